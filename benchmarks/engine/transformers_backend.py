"""Compare a model that runs with transformers' code in our engine with the same model in transformers itself.

``python -m benchmarks.engine.transformers_backend`` uses a random OLMo 2 of about 60 million parameters in bfloat16
(``--dtype`` and ``--model`` take others). Each round starts `medusa serve` and a process that calls
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

_MAKE = """
import sys, torch, transformers
config = transformers.Olmo2Config(
    vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=int(sys.argv[2]),
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=1024, eos_token_id=2, pad_token_id=1,
)
transformers.Olmo2ForCausalLM(config).to(getattr(torch, sys.argv[3])).save_pretrained(sys.argv[1])
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
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the random model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make(Path(folder), dtype=arguments.dtype)
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


def make(folder: Path, layers: int = 16, dtype: str = "bfloat16") -> Path:
    """Write the random model."""
    subprocess.run([sys.executable, "-c", _MAKE, str(folder), str(layers), dtype], check=True, capture_output=True)
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
