"""Locks what the images install: `python images/lock.py` writes images/locks/<variant>.txt, and build.txt: what builds
the runtime's own wheel.

Versions and hashes, and nothing of the registry that they were found in: an image is built from any index that has the
same files. It takes `uv` (pip install uv); UV_DEFAULT_INDEX and its other variables say where to look.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "images" / "locks"
# What the base has: bookworm's Python and C library.
PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_36"
_FLAGS: tuple[str, ...] = (
    "--generate-hashes",
    "--only-binary=:all:",
    "--no-header",
    "--no-annotate",
    "--no-emit-index-url",
    "--quiet",
)
_FLAGS += ("--index-strategy=unsafe-best-match",)  # as pip does: a build for CPUs may be in any index
BUILD = "build"
HEADER = "# Made by `python images/lock.py {variant}` from pyproject.toml and images/variants.toml.\n"


def main() -> int:
    variants = tomllib.loads((ROOT / "images/variants.toml").read_text())
    known = [*sorted(set(variants) - {"common"}), BUILD]
    parser = argparse.ArgumentParser(description="Lock the packages of the images, with their hashes.")
    parser.add_argument("variants", nargs="*", default=known, metavar="VARIANT", help=f"of {', '.join(known)}")
    parser.add_argument("--find-links", metavar="DIR", help="a folder with torch's wheel; else its own index is asked")
    arguments = parser.parse_args()
    for name in arguments.variants:
        if name not in known:
            parser.error(f"{name!r} is no variant: expected {', '.join(known)}")
        LOCKS.mkdir(exist_ok=True)
        variant = variants.get(name, {})
        wanted = build_requirements() if name == BUILD else requirements(variant, variants["common"])
        index = ["--index", variant["torch_index"]] if "torch_index" in variant else []
        places = index if arguments.find_links is None else ["--find-links", arguments.find_links]
        (LOCKS / f"{name}.txt").write_text(HEADER.format(variant=name) + resolve(wanted, places))
        print(f"wrote {LOCKS / name}.txt")
    return 0


def build_requirements() -> list[str]:
    wanted: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    return wanted


def requirements(variant: dict[str, Any], common: dict[str, Any]) -> list[str]:
    """What `install.py` installs for a variant. pip itself is among it: the one that comes with Python is old."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = ["pip", variant["torch"]]
    wanted += [each for each in project["dependencies"] if not each.startswith("torch")]
    for extra in [*common["extras"], *variant.get("extras", [])]:
        wanted += project["optional-dependencies"][extra]
    return [*wanted, *variant.get("packages", [])]


def resolve(wanted: list[str], places: list[str]) -> str:
    """uv's resolution, checked to name no place."""
    with tempfile.TemporaryDirectory(prefix="medusa-lock-") as scratch:
        source = Path(scratch) / "requirements.in"
        source.write_text("\n".join(wanted) + "\n")
        command = ["uv", "pip", "compile", *_FLAGS, "--python-version", PYTHON, "--python-platform", PLATFORM]
        done = subprocess.run(
            [*command, *places, str(source)], capture_output=True, text=True, check=False, cwd=scratch
        )
    if done.returncode:
        sys.exit(f"expected uv to find all packages, it says:\n{done.stderr}")
    if found := re.search(r"(?m)^(?!\S+==\S+( ;.*)? \\$|    --hash=sha256:[0-9a-f]{64}( \\)?$).+", done.stdout):
        sys.exit(f"expected versions and hashes alone in a lock, found {found[0]!r}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
