"""Print the size of each layer of an image, and what is in it: `python images/layers.py IMAGE [--limit-gb N]`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from podman import environment

# Counts the bytes of each top folder or package, from inside of the image: hot is what a cold start reads.
COUNT = """
import collections, json, os, pathlib, re
home = pathlib.Path("/opt/medusa")
hot = set((home / "cold-start.txt").read_text().splitlines())
sizes = {"cold": collections.Counter(), "hot": collections.Counter(), "own": collections.Counter()}
for folder, _, names in os.walk(home):
    for name in names:
        path = pathlib.Path(folder, name).relative_to(home)
        own = str(path) == "cold-start.txt" or re.match("(bin|lib/python[^/]+/site-packages)/medusa", str(path))
        parts = path.parts[3:] if "site-packages" in path.parts else path.parts
        sizes["own" if own else "hot" if str(path) in hot else "cold"][parts[0]] += os.lstat(home / path).st_size
print(json.dumps(sizes))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Weigh an image.")
    parser.add_argument("image")
    parser.add_argument("--limit-gb", type=float, help="fail above this many GB (10^9 bytes, uncompressed)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="medusa-podman-") as scratch:
        os.environ.update(environment(Path(scratch)))
        return weigh(arguments.image, arguments.limit_gb)


def weigh(image: str, limit_gb: float | None) -> int:
    history = json.loads(podman("history", "--no-trunc", "--format", "json", image))
    total = sum(layer["size"] for layer in history)
    for layer in reversed(history):
        if layer["size"]:
            print(f"{layer['size'] / 1e6:8.1f} MB  {shortened(layer['CreatedBy'])}")
    print(f"{total / 1e6:8.1f} MB  in all")
    counted = podman("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", COUNT)
    for name, sizes in json.loads(counted).items():
        largest = ", ".join(f"{each} {size / 1e6:.0f}" for each, size in Counter(sizes).most_common(12))
        print(f"{name}: {sum(sizes.values()) / 1e6:.1f} MB ({largest})")
    if limit_gb is not None and total > limit_gb * 1e9:
        print(f"{image} has {total / 1e9:.2f} GB; expected at most {limit_gb}", file=sys.stderr)
        return 1
    return 0


def shortened(command: str) -> str:
    command = command.replace("/bin/sh -c ", "").replace("#(nop) ", "")
    return command if len(command) <= 90 else command[:87] + "…"


def podman(*arguments: str) -> str:
    ran = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"podman {arguments[0]}: {ran.stderr.strip()}")
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
