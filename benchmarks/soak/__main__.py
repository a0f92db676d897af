"""Long runs under mixed load and faults.

    python -m benchmarks.soak serve --seconds 600              a function under requests of thirty kinds
    python -m benchmarks.soak serve --seconds 600 --faults     the same, while its processes are killed and stopped
    python -m benchmarks.soak node --seconds 600               a node agent whose callers and children are killed
    python -m benchmarks.soak node --seconds 600 --faults      and itself
    python -m benchmarks.soak cluster --seconds 900            a laboratory whose models come and go; as root
    python -m benchmarks.soak cluster --seconds 900 --faults   the same, while processes, nodes and links fail
    python -m benchmarks.soak commands --seconds 600           fetch, materialize, bench and simulate, killed

Prints what of the processes' memory, descriptors, threads, shared memory and files grew with the work done, and each
answer, hang or leftover that should not have been. The status is 1 if there was any of either.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.command_line import run
from benchmarks.soak import cluster, commands, node, serve
from benchmarks.soak.growth import growths, table

_KINDS = {"serve": serve.Soak, "node": node.Soak, "cluster": cluster.Soak, "commands": commands.Soak}
_SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(_KINDS))
    parser.add_argument("--model", type=Path, default=Path("examples/pydoc-lm"))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--faults", action="store_true", help="kill, stop and cut meanwhile; of node, the agent itself")
    parser.add_argument("--only", default="", help="serve: kinds of requests, commands: commands; with commas")
    parser.add_argument("--fleet", type=Path, default=Path("examples/fleet/two-testbeds.yaml"), help="what to simulate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the samples to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = _KINDS[arguments.what](arguments, Path(folder))
        soak.run()
    print(dict(soak.asked), dict(soak.killed), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(soak.samples))
    for wrong in soak.wrong[:_SHOWN]:
        print(f"WRONG: {wrong}")
    if len(soak.wrong) > _SHOWN:
        print(f"and {len(soak.wrong) - _SHOWN} more")
    found = growths(soak.samples)
    print(table(found))
    return 1 if soak.wrong or any(each.grows for each in found) else 0


if __name__ == "__main__":
    run(main)
