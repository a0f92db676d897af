"""Compare the tokens per second of structured outputs with those of the same model's free text.

``python -m benchmarks.engine.structured`` runs the torch engine in its own process, with batches of random prompts.
Each round runs both in turn, so that other load on the machine affects both. The first structured request starts the
process for grammars, and is not timed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
from pathlib import Path
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.engine.base import GenerateRequest, SamplingParams, StructuredOutputs
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from benchmarks.batches import PROMPT_TOKENS, engine_rate

_SCHEMA = {
    "type": "array",
    "minItems": 1000,  # so many that generation continues until max_tokens
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "count", "tags"],
        "additionalProperties": False,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/pydoc-lm")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.batch, arguments.tokens, arguments.runs)
    print("| row | tokens/s |\n|---|---|")
    for row in ("free", "structured"):
        print(f"| `{row}` | {statistics.median(result[row]):,.0f} |")
    print(f"ratio of pairs, median: {result['ratio']:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


def measure(model: str, batch: int, tokens: int, runs: int) -> dict[str, Any]:
    """Return the tokens per second of each run, free and structured, and the median of the ratios of pairs."""
    from medusa_runtime.engine.torch.engine import TorchEngine

    region = Region.create()
    prefetch(region, model, settings=Settings(), timeline=Timeline.create("prefetcher"))
    engine = TorchEngine(region, Settings(max_concurrency=batch), Timeline.create("engine"))
    stop = threading.Event()
    thread = threading.Thread(target=engine.run, args=(stop,), daemon=True)
    thread.start()
    try:
        engine.wait_ready()
        for structured in (False, True):
            _round(engine, "warm", batch, 8, structured=structured)
        rates: dict[str, list[float]] = {"free": [], "structured": []}
        for run in range(runs):
            for row in ("free", "structured"):
                rates[row].append(_round(engine, f"{row}{run}", batch, tokens, structured=row == "structured"))
    finally:
        stop.set()
        thread.join()
        engine.close()
        region.close()
    ratios = [structured / free for free, structured in zip(rates["free"], rates["structured"], strict=True)]
    return {**rates, "ratio": statistics.median(ratios)}


def _round(engine: Any, name: str, batch: int, tokens: int, *, structured: bool) -> float:
    """Run a batch, and return its tokens per second from the first token of any request to the last."""
    form = StructuredOutputs("json_schema", json.dumps(_SCHEMA)) if structured else None
    dice = random.Random(name)
    requests = []
    for number in range(batch):
        prompt = tuple(dice.randrange(3, engine.info.vocab_size) for _ in range(PROMPT_TOKENS))
        params = SamplingParams(
            max_tokens=tokens, temperature=1.0, seed=number, ignore_eos=not structured, structured_outputs=form
        )
        requests.append(GenerateRequest(f"{name}-{number}", prompt, params))
    return engine_rate(engine, requests)


if __name__ == "__main__":
    main()
