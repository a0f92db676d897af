"""Measure the first request that needs vLLM's own routes: ``.venv-vllm/bin/python -m benchmarks.vllm_layer``.

The request is sent as soon as the instance is ready, to an instance from a cold process and to one with a node agent's
warm engine. ``later`` is the same request again. Needs vLLM in the environment that runs it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from medusa_adapters.bench.bytecode import compile_packages
from medusa_adapters.bench.node import Node
from medusa_adapters.bench.served_instance import ServedInstance, medusa_command, serve_command

_PATH = "/v1/responses"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/pydoc-lm")
    parser.add_argument("--rows", default="cold,prewarmed")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    arguments = parser.parse_args()
    compile_packages(sys.executable)
    rows = {row: measure(row, arguments.model, arguments.runs) for row in arguments.rows.split(",")}
    print("| row | first s | later s |\n|---|---|---|")
    for row, found in rows.items():
        first, later = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"| `{row}` | {first:.3f} | {later:.3f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


def measure(row: str, model: str, runs: int) -> list[tuple[float, float]]:
    """Return the seconds of the first and of the second request of each run."""
    if row == "cold":
        return [_asked(model, "--node-socket", "none") for _ in range(runs)]
    node = Node(medusa_command(), "vllm")
    found = []
    try:
        for _ in range(runs):
            node.wait_warm(model)
            found.append(_asked(model, "--node-socket", node.socket))
    finally:
        node.close()
    return found


def _asked(model: str, *flags: str) -> tuple[float, float]:
    with ServedInstance(serve_command("--model", model, "--engine", "vllm", *flags)) as instance:
        instance.wait_ready()
        return _ask(instance), _ask(instance)


def _ask(instance: ServedInstance) -> float:
    began = time.monotonic()
    body = json.dumps({"input": "Return the", "max_output_tokens": 1})
    answer = instance.exchange("POST", _PATH, body)
    if answer.status != 200:
        raise instance.failure(f"answered {answer.status}: {answer.text[:200]}")
    return time.monotonic() - began


if __name__ == "__main__":
    main()
