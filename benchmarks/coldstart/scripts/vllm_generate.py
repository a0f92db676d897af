"""vLLM's own cold start, run in a fresh process. It prints a JSON line at its first token, and one at the end.

Arguments: model folder, prompt, number of tokens to generate, arguments of `LLM` as JSON. Needs vLLM and nothing of
ours.
"""

import json
import os
import sys


def main() -> None:
    folder, prompt, max_tokens, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    # vLLM, its other processes and its libraries log to stdout. So the lines for the benchmark have another descriptor.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, **options)

    def generate(tokens: int) -> dict[str, object]:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        output = engine.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        return {"text": output.text, "token_ids": list(output.token_ids)}

    print(json.dumps(generate(1)), file=answers, flush=True)
    print(json.dumps(generate(max_tokens)), file=answers, flush=True)


if __name__ == "__main__":  # vLLM spawns its other processes, which import this file again
    main()
