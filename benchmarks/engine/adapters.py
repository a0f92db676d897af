"""Measure the cost of LoRA adapters: tokens per second with four in a batch, and a first token with one not yet loaded.

``python -m benchmarks.engine.adapters`` runs the torch engine in its own process, with adapters of random values for
all linear layers of a Llama. Each round runs a batch without adapters, and one whose requests use four adapters in
turn, so that other load on the machine affects both. The second table has the time from a request's arrival to its
first token: for the base model, for a loaded adapter, and for one that has to be fetched from a folder.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from benchmarks.batches import PROMPT_TOKENS, engine_rate

_ADAPTERS = 4
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/pydoc-lm", help="a Llama in one safetensors file")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="of each request")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.rank, arguments.batch, arguments.tokens, arguments.runs)
    print("| row | tokens/s |\n|---|---|")
    for row in ("base", "adapters"):
        print(f"| `{row}` | {statistics.median(result[row]):,.0f} |")
    print(f"ratio of pairs, median: {result['ratio']:.2f}\n")
    print("| first token of | ms |\n|---|---|")
    for row in ("base", "loaded", "fetched"):
        print(f"| `{row}` | {statistics.median(result[f'first_{row}_ms']):.1f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


def measure(model: str, rank: int, batch: int, tokens: int, runs: int) -> dict[str, Any]:
    """Return the tokens per second of each run with and without adapters, their median ratio, and first-token times."""
    from medusa_runtime.engine.torch.engine import TorchEngine

    with tempfile.TemporaryDirectory() as folder:
        files = [_write(Path(folder), model, rank, number) for number in range(_ADAPTERS + 1)]
        region = _region(model)
        engine = TorchEngine(region, Settings(max_concurrency=batch, max_lora_rank=rank), Timeline.create("engine"))
        stop = threading.Event()
        thread = threading.Thread(target=engine.run, args=(stop,), daemon=True)
        thread.start()
        try:
            engine.wait_ready()
            for number in range(_ADAPTERS):
                engine.add_adapter(str(number), _region(files[number]))
                engine.wait_adapter(str(number))
            result = _rates(engine, batch, tokens, runs) | _first_tokens(engine, files[-1], runs)
        finally:
            stop.set()
            thread.join()
            engine.close()
            region.close()
    return result


def _rates(engine: Any, batch: int, tokens: int, runs: int) -> dict[str, Any]:
    names = {"base": [None], "adapters": [str(number) for number in range(_ADAPTERS)]}
    for row, adapters in names.items():
        _round(engine, f"warm-{row}", batch, 8, adapters)
    rates: dict[str, list[float]] = {"base": [], "adapters": []}
    for run in range(runs):
        for row, adapters in names.items():
            rates[row].append(_round(engine, f"{row}{run}", batch, tokens, adapters))
    ratios = [adapted / base for base, adapted in zip(rates["base"], rates["adapters"], strict=True)]
    return {**rates, "ratio": statistics.median(ratios)}


def _first_tokens(engine: Any, late: str, runs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"first_base_ms": [], "first_loaded_ms": [], "first_fetched_ms": []}
    for run in range(runs):
        for row, adapter in (("base", None), ("loaded", "0"), ("fetched", "late")):
            began = time.perf_counter()
            if row == "fetched":
                engine.add_adapter("late", _region(late))
            _round(engine, f"first-{row}{run}", 1, 1, [adapter])
            found[f"first_{row}_ms"].append((time.perf_counter() - began) * 1e3)
            engine.drop_adapter("late")
    return found


def _round(engine: Any, name: str, batch: int, tokens: int, adapters: Any) -> float:
    """Run a batch, and return its tokens per second from the first token of any request to the last."""
    dice = random.Random(name)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = [tuple(dice.randrange(3, engine.info.vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(batch)]
    return engine_rate(
        engine,
        [
            GenerateRequest(f"{name}-{number}", prompt, params, adapter=adapters[number % len(adapters)])
            for number, prompt in enumerate(prompts)
        ],
    )


def _region(url: str) -> Region:
    region = Region.create()
    prefetch(region, url, settings=Settings(), timeline=Timeline.create("prefetcher"))
    return region


def _write(folder: Path, model: str, rank: int, number: int) -> str:
    """Write an adapter with random values for all linear layers of the model, and return its file."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(number)
    tensors = {}
    with safe_open(Path(model) / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  the file is not a mapping
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in _TARGETS:
                outs, ins = file.get_slice(name).get_shape()
                a, b = torch.randn(rank, ins, generator=generator), torch.randn(outs, rank, generator=generator)
                tensors[f"base_model.model.{module}.lora_A.weight"] = a * 0.02
                tensors[f"base_model.model.{module}.lora_B.weight"] = b * 0.02
    own = folder / str(number)
    own.mkdir()
    save_file(tensors, own / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(_TARGETS)}
    (own / "adapter_config.json").write_text(json.dumps(config))
    return str(own / "adapter_model.safetensors")


if __name__ == "__main__":
    main()
