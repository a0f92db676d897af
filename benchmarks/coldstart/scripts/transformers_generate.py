"""The contestant `transformers`, run in a fresh process. It prints a JSON line at its first token, and one at the end.

Arguments: model folder, prompt, number of tokens to generate. With a fourth argument, batch sizes such as 1,8, the last
line has the tokens per second at these sizes instead of the text.
"""

import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config


def main() -> None:
    folder, prompt, max_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Without a GPU, or kernels from the hub, transformers computes with the floats that MXFP4 stands for.
    is_mxfp4 = (
        AutoConfig.from_pretrained(folder).to_dict().get("quantization_config", {}).get("quant_method") == "mxfp4"
    )
    more = {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **more)
    model.generation_config.eos_token_id = None
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        first = int(model(**inputs, logits_to_keep=1).logits[0, -1].argmax())
        print(json.dumps({"text": tokenizer.decode([first])}), flush=True)
        if len(sys.argv) > 4:
            steady(model, inputs, max_tokens, [int(size) for size in sys.argv[4].split(",")])
            return
        output = generate(model, inputs, max_tokens)[0, inputs["input_ids"].shape[1] :]
    print(json.dumps({"text": tokenizer.decode(output, skip_special_tokens=True)}), flush=True)


def generate(model: torch.nn.Module, inputs: dict[str, torch.Tensor], max_tokens: int) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)  # type: ignore[operator, no-any-return]


def steady(model: torch.nn.Module, inputs: dict[str, torch.Tensor], max_tokens: int, sizes: list[int]) -> None:
    """Print the tokens per second of a whole generation at each batch size, after a short one to warm up."""
    generate(model, inputs, 4)
    rates = {}
    for size in sizes:
        batch = {name: tensor.repeat(size, 1) for name, tensor in inputs.items()}
        began = time.perf_counter()
        generate(model, batch, max_tokens)
        rates[size] = size * max_tokens / (time.perf_counter() - began)
    print(json.dumps({"tokens_per_s": rates}), flush=True)


if __name__ == "__main__":
    main()
