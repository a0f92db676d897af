"""vLLM's own cold start, a fresh process: `LLM(...)`, then one JSON line at its first token, and one at the end.

Arguments: model folder, prompt, tokens to generate, arguments of LLM as JSON. With a fifth, batch sizes as 1,8, it goes
on to measure those. Needs vLLM and nothing of ours.
"""

import json
import os
import sys
import time


def main() -> None:
    folder, prompt, max_tokens, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    # vLLM, its other processes and its libraries log to stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, **options)

    def generate(tokens: int, batch: int = 1) -> dict[str, object]:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        output = engine.generate([prompt] * batch, params, use_tqdm=False)[0].outputs[0]
        return {"text": output.text, "token_ids": list(output.token_ids)}

    print(json.dumps(generate(1)), file=answers, flush=True)
    if len(sys.argv) > 5:
        generate(4)
        rates = {}
        for batch in (int(size) for size in sys.argv[5].split(",")):
            began = time.perf_counter()
            generate(max_tokens, batch)
            rates[batch] = batch * max_tokens / (time.perf_counter() - began)
        print(json.dumps({"tokens_per_s": rates}), file=answers, flush=True)
        return
    print(json.dumps(generate(max_tokens)), file=answers, flush=True)


if __name__ == "__main__":  # vLLM starts its other processes with spawn: they import this file again
    main()
