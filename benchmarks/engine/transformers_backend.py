"""Compare a model that runs with transformers' code in our engine with the same model in transformers itself.

``python -m benchmarks.engine.transformers_backend`` uses a random OLMo 2 of about 60 million parameters in bfloat16
(``--shape``, ``--dtype`` and ``--model`` take others). Each round starts `medusa serve` and a process that calls
``from_pretrained`` and ``generate``, in turn. It measures the time from the exec to the first token, and then lets both
continue a batch of prompts greedily.
The last line is the share of ``generate``'s CPU time that torch's matrix products of the decode steps take by
themselves. An engine with the same products can be faster at most by the inverse of this share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.batches import PROMPT_TOKENS, served_times

# The class of transformers, and the sizes. All but the first keep states; the last two run with our own code.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo-2": ("Olmo2ForCausalLM", {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16,
        "num_attention_heads": 8, "num_key_value_heads": 8,
    }),
    "granite-4-h": ("GraniteMoeHybridForCausalLM", {
        "vocab_size": 8192, "hidden_size": 768, "shared_intermediate_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 32,
        "mamba_d_state": 128, "num_local_experts": 0, "num_experts_per_tok": 0,
        "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 2,
    }),
    "lfm2": ("Lfm2ForCausalLM", {
        "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    }),
    "qwen3.5": ("Qwen3_5ForCausalLM", {
        "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
    }),
}  # fmt: skip
_MAKE = """
import json, sys, torch, transformers
kind, sizes = getattr(transformers, sys.argv[2]), json.loads(sys.argv[3])
config = kind.config_class(**sizes, max_position_embeddings=1024, eos_token_id=2, pad_token_id=1)
kind(config).to(getattr(torch, sys.argv[4])).save_pretrained(sys.argv[1])
"""
_THEIRS = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
folder, batch, tokens, prompt = sys.argv[1], *map(int, sys.argv[2:5])
model = AutoModelForCausalLM.from_pretrained(folder)
greedy = {"do_sample": False, "pad_token_id": 1}

def run(rows, count):
    ids = torch.tensor([[(row * 31 + at * 7) % 5000 + 3 for at in range(prompt)] for row in range(rows)])
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, **greedy)

run(1, 1)
print(json.dumps({"first": time.time()}), flush=True)
run(batch, 4)
began, cpu = time.perf_counter(), time.process_time()
run(batch, tokens)
cpu = time.process_time() - cpu
rate = batch * tokens / (time.perf_counter() - began)
weights = [part.weight for part in model.modules() if isinstance(part, torch.nn.Linear)]
inputs = [torch.randn(batch, weight.shape[1], dtype=weight.dtype) for weight in weights]

@torch.inference_mode()
def multiply(steps):
    for _ in range(steps):
        for x, weight in zip(inputs, weights):
            torch.nn.functional.linear(x, weight)

multiply(4)
began = time.process_time()
multiply(tokens)
print(json.dumps({"rate": rate, "products": (time.process_time() - began) / cpu}), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint in place of a random model")
    parser.add_argument("--shape", choices=SHAPES, default="olmo-2", help="of the random model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the random model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make(Path(folder), arguments.shape, arguments.dtype)
        result = measure(model, arguments.batch, arguments.tokens, arguments.runs)
    print("| | first token | tokens/s |\n|---|---|---|")
    for row in ("ours", "theirs"):
        first, rate = (statistics.median(result[row][name]) for name in ("first", "rate"))
        print(f"| `{row}` | {first:.2f} s | {rate:,.0f} |")
    print(f"ratios of pairs, medians: first token {result['first_ratio']:.2f}, tokens/s {result['rate_ratio']:.2f}")
    share = statistics.median(result["theirs"]["products"])
    print(
        f"products: {share:.0%} of the CPU time of `generate`, so at most {1 / share:.1f} times its tokens/s with them"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


def make(folder: Path, shape: str = "olmo-2", dtype: str = "bfloat16", **changes: Any) -> Path:
    """Write a random model of a shape, with some of its sizes changed."""
    name, sizes = SHAPES[shape]
    command = [sys.executable, "-c", _MAKE, str(folder), name, json.dumps(sizes | changes), dtype]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def measure(model: Path, batch: int, tokens: int, runs: int) -> dict[str, Any]:
    """Return each run's seconds to the first token and tokens per second, and the medians of the ratios of pairs."""
    result: dict[str, Any] = {"ours": {}, "theirs": {}}
    for _ in range(runs):
        for row, run in (("ours", _ours), ("theirs", _theirs)):
            for name, value in run(model, batch, tokens).items():
                result[row].setdefault(name, []).append(value)
    for name in ("first", "rate"):
        pairs = zip(result["ours"][name], result["theirs"][name], strict=True)
        result[f"{name}_ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return result


def _ours(model: Path, batch: int, tokens: int) -> dict[str, float]:
    first, (rate,) = served_times(model, [batch], tokens)
    return {"first": first, "rate": rate}


def _theirs(model: Path, batch: int, tokens: int) -> dict[str, float]:
    began = time.time()
    command = [sys.executable, "-c", _THEIRS, str(model), str(batch), str(tokens), str(PROMPT_TOKENS)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {"first": json.loads(out[-2])["first"] - began, **json.loads(out[-1])}


if __name__ == "__main__":
    main()
