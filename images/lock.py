"""Lock what the images install: `python images/lock.py` writes images/locks/<variant>.txt and, for the tools that build
the runtime's own wheel, build.txt.

A lock has versions and hashes, and names no registry, so an image can be built from any index that has the same files.
It is for each of the architectures: their versions are equal, and what only one of them needs has a marker.
This needs `uv` (pip install uv); UV_DEFAULT_INDEX and its other variables say where to look.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "images" / "locks"
# What the base has: bookworm's Python and C library.
PYTHON, PLATFORM = "3.11", "manylinux_2_36"
ARCHITECTURES = ("x86_64", "aarch64")
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
PYPI = "https://pypi.org/simple"
HEADER = "# Made by `python images/lock.py {variant}` from pyproject.toml and images/variants.toml.\n"


def main() -> int:
    variants = tomllib.loads((ROOT / "images/variants.toml").read_text())
    known = [*sorted(set(variants) - {"common"}), BUILD]
    parser = argparse.ArgumentParser(description="Lock the packages of the images, with their hashes.")
    parser.add_argument("variants", nargs="*", default=known, metavar="VARIANT", help=f"of {', '.join(known)}")
    parser.add_argument("--find-links", metavar="DIR", help="a folder with torch's wheels; else its own index is asked")
    parser.add_argument("--upgrade", action="store_true", help="to the newest versions; else as few change as can")
    parser.add_argument(
        "--verify", action="store_true", help="write nothing; ask the index whether it has these hashes"
    )
    arguments = parser.parse_args()
    for name in arguments.variants:
        if name not in known:
            parser.error(f"{name!r} is no variant: expected {', '.join(known)}")
        LOCKS.mkdir(exist_ok=True)
        variant = variants.get(name, {})
        if arguments.verify:
            verify(name, variant.get("torch_index"), arguments.find_links)
            continue
        wanted = build_requirements() if name == BUILD else requirements(variant, variants["common"])
        index = ["--index", variant["torch_index"]] if "torch_index" in variant else []
        lock = LOCKS / f"{name}.txt"
        earlier = lock.read_text() if lock.exists() and not arguments.upgrade else ""
        if arguments.find_links is None or not index:
            made = merge({machine: resolve(wanted, machine, index, earlier) for machine in ARCHITECTURES})
        else:
            folder = Path(arguments.find_links).resolve()
            there = [machine for machine in ARCHITECTURES if list(folder.glob(f"torch-*_{machine}.whl"))]
            places = ["--find-links", str(folder)]
            made = merge({machine: resolve(wanted, machine, places, earlier) for machine in there}, earlier)
        lock.write_text(HEADER.format(variant=name) + made)
        print(f"wrote {lock}")
    return 0


def build_requirements() -> list[str]:
    wanted: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    return wanted


def requirements(variant: dict[str, Any], common: dict[str, Any]) -> list[str]:
    """Return what `install.py` installs for a variant: also pip, because the one that comes with Python is old."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = ["pip", variant["torch"]]
    wanted += [each for each in project["dependencies"] if not each.startswith("torch")]
    for extra in [*common["extras"], *variant.get("extras", [])]:
        wanted += project["optional-dependencies"][extra]
    return [*wanted, *variant.get("packages", [])]


def resolve(wanted: list[str], machine: str, places: list[str], earlier: str) -> str:
    """Return uv's lock for an architecture, with the versions of the lock ``earlier`` where they fit.

    It names no index.
    """
    with tempfile.TemporaryDirectory(prefix="medusa-lock-") as scratch:
        source = Path(scratch) / "requirements.in"
        source.write_text("\n".join(wanted) + "\n")
        target = Path(scratch) / "requirements.txt"
        target.write_text(earlier)
        platform = ["--python-version", PYTHON, "--python-platform", f"{machine}-{PLATFORM}"]
        done = subprocess.run(
            ["uv", "pip", "compile", *_FLAGS, *platform, *places, "--output-file", str(target), str(source)],
            capture_output=True,
            text=True,
            check=False,
            cwd=scratch,
        )
        if done.returncode:
            sys.exit(f"expected uv to find all packages for {machine}, it says:\n{done.stderr}")
        found = target.read_text()
    if wrong := re.search(r"(?m)^(?!\S+==\S+( ;.*)? \\$|    --hash=sha256:[0-9a-f]{64}( \\)?$).+", found):
        sys.exit(f"expected versions and hashes alone in a lock, found {wrong[0]!r}")
    return found


def merge(locks: dict[str, str], earlier: str = "") -> str:
    """Return one lock for all architectures. A package that some of them lack has a marker.

    For an architecture that is not among ``locks``, the lock ``earlier`` counts: its markers, and its hashes of the
    same versions.
    """
    if not locks:
        sys.exit(f"expected a wheel of torch for one of {', '.join(ARCHITECTURES)} in the folder, found none")
    found = {machine: entries(lock) for machine, lock in locks.items()}
    before = entries(earlier)
    lines = []
    for name in sorted({name for each in found.values() for name in each}):
        having = [machine for machine in found if name in found[machine]]
        versions = {found[machine][name].version for machine in having}
        if len(versions) > 1:
            sys.exit(f"expected one version of {name} for all architectures, found {', '.join(sorted(versions))}")
        (version,) = versions
        hashes = {each for machine in having for each in found[machine][name].hashes}
        marker = "" if len(having) == len(found) else " or ".join(f"platform_machine == '{each}'" for each in having)
        if name in before and len(found) < len(ARCHITECTURES):
            marker = marker or before[name].marker
            hashes |= before[name].hashes if before[name].version == version else set()
        pins = [f"{name}{version}" + (f" ; {marker}" if marker else "")]
        lines.append(" \\\n    ".join([*pins, *(f"--hash=sha256:{each}" for each in sorted(hashes))]) + "\n")
    return "".join(lines)


class Entry(NamedTuple):
    """A package of a lock: ``version`` with its operator, ``marker`` or nothing, and the hashes of its files."""

    version: str
    marker: str
    hashes: set[str]


def entries(lock: str) -> dict[str, Entry]:
    """Return the packages of a lock by their names."""
    pattern = r"(?m)^([\w.-]+)(=\S+)(?: ; (.+?))? \\\n((?:    --hash=\S+(?: \\)?\n)+)"
    return {
        name: Entry(version, marker, set(re.findall(r"sha256:([0-9a-f]{64})", hashes)))
        for name, version, marker, hashes in re.findall(pattern, lock)
    }


def verify(name: str, torch_index: str | None, folder: str | None) -> None:
    """Check that each hash is published by an index, or is that of a file in ``folder``.

    If not, or if no index that has the version answers, end the program with a message.
    """
    indexes = [os.environ.get("UV_DEFAULT_INDEX") or PYPI, *([torch_index] if torch_index else [])]
    own = {hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(folder).glob("*.whl")} if folder else set()
    locked = entries((LOCKS / f"{name}.txt").read_text())
    with ThreadPoolExecutor(8) as threads:
        published = list(threads.map(lambda package: published_hashes(package, indexes), locked))
    wrong = [
        package for package, known in zip(locked, published, strict=True) if not locked[package].hashes <= known | own
    ]
    if wrong:
        sys.exit(f"{name}: no index that was asked ({', '.join(indexes)}) has all hashes of {', '.join(wrong)}")
    print(f"{name}: all hashes of {len(locked)} packages are the index's")


def published_hashes(package: str, indexes: list[str]) -> set[str]:
    """Return the hashes of all files of a package (simple repository API, PEP 503), from the indexes that answer."""
    found: set[str] = set()
    for index in indexes:
        with suppress(OSError), urlopen(f"{index.rstrip('/')}/{package}/", timeout=60) as answer:
            found |= set(re.findall(r"#sha256=([0-9a-f]{64})", answer.read().decode()))
    return found


if __name__ == "__main__":
    sys.exit(main())
