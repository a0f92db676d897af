"""Measure a model and its quantized forms: ``python -m benchmarks.engine.quantized --model out/llama-57m``.

Each round serves every form in turn. It measures the time from the exec to the first token, with the checkpoint in an
object store that sends ``--rate`` MB/s on each connection, and then the tokens per second of one greedy sequence and of
a batch. The weights are rounded to the nearest integer in groups of 64 columns, or in rows for int8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.batches import served_times
from benchmarks.origin import Origin, Variant
from benchmarks.quantize import FORMATS, quantize

_GROUP = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with one safetensors file")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int8", "pack-4", "gptq-4", "awq"])
    parser.add_argument("--rate", type=float, default=50, help="MB/s of a connection to the store (50)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    given = parser.parse_args()
    result = measure(given.model, given.formats, given.rate, given.batch, given.tokens, given.runs)
    print(f"| | MB | first token | tokens/s | tokens/s, batch {given.batch} |\n|---|---|---|---|---|")
    for name, row in result.items():
        first, one, batch = (statistics.median(row[column]) for column in ("first", "one", "batch"))
        print(f"| `{name}` | {row['mb']:.0f} | {first:.2f} s | {one:,.0f} | {batch:,.0f} |")
    if given.json:
        given.json.write_text(json.dumps(result))


def measure(
    model: Path, formats: list[str], rate_mb: float, batch: int, tokens: int, runs: int
) -> dict[str, dict[str, Any]]:
    """Return, for each form, the MB of its weights, and each run's seconds to the first token and tokens per second.

    The first form is the model without quantization. ``rate_mb`` is the rate of a connection to the store, in MB/s.
    """
    with tempfile.TemporaryDirectory(prefix="medusa-bench-") as scratch:
        root = Path(scratch, "root")
        root.mkdir()
        (root / "unquantized").symlink_to(model.resolve())
        for name in formats:
            options = FORMATS[name].options
            quantize(model, root / name, name, options=options._replace(group=options.group and _GROUP))
        rows = ["unquantized", *formats]
        sizes = {name: (root / name / "model.safetensors").stat().st_size / 1e6 for name in rows}
        result: dict[str, dict[str, Any]] = {
            name: {"mb": sizes[name], "first": [], "one": [], "batch": []} for name in rows
        }
        with Origin(root, Path(scratch), Variant("store", rate_bytes_per_s=int(rate_mb * 1e6))) as origin:
            for _ in range(runs):
                for name in rows:
                    for column, value in _served(f"{origin.url}/{name}", batch, tokens).items():
                        result[name][column].append(value)
    return result


def _served(url: str, batch: int, tokens: int) -> dict[str, float]:
    first, (one, several) = served_times(url, [1, batch], tokens)
    return {"first": first, "one": one, "batch": several}


if __name__ == "__main__":
    main()
