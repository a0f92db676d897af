"""Fill /opt/medusa in the build: ``packages VARIANT GPUS`` installs what the runtime needs, ``runtime`` the runtime.

GPUS are compute capabilities, such as 9.0 or 8.0,9.0: the machine code for other GPUs is left out. Empty keeps all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import gpu_code

BUILD = Path(__file__).parent
HOME = Path("/opt/medusa")
PYTHON = str(HOME / "bin/python")
PIP = (PYTHON, "-m", "pip", "--no-cache-dir", "--disable-pip-version-check")


def main() -> None:
    os.environ["PIP_ROOT_USER_ACTION"] = "ignore"
    if sys.argv[1] == "runtime":
        install_runtime()
        return
    name, asked = sys.argv[2:]
    variants = tomllib.loads((BUILD / "variants.toml").read_text())
    if name not in variants or name == "common":
        sys.exit(f"VARIANT={name!r}: expected {', '.join(sorted(set(variants) - {'common'}))}")
    try:
        gpus = gpu_code.parse_gpus(asked) if asked else []
    except argparse.ArgumentTypeError as error:
        sys.exit(f"GPU: {error}")
    if gpus and "gpu_code" not in variants[name]:
        sys.exit(f"GPU={asked!r}: expected a variant with code for GPUs, found {name}")
    install_packages(name, variants[name], variants["common"])
    if gpus:
        keep_gpus(variants[name]["gpu_code"], gpus)


def install_packages(name: str, variant: dict[str, Any], common: dict[str, Any]) -> None:
    subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
    # The lock also has pip itself, because the one that comes with Python has known vulnerabilities.
    install_locked(BUILD / "locks" / f"{name}.txt", variant.get("torch_index"))
    for distribution in variant.get("remove", []):
        run(*PIP, "uninstall", "--yes", distribution)
    freeze = subprocess.run([*PIP, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
    (HOME / "constraints.txt").write_text(freeze)
    for pattern in (*common["prune"], *variant.get("prune", [])):
        prune(pattern)
    compile_all(site_packages())


def install_locked(lock: Path, index: str | None, *flags: str) -> None:
    """Install from the building machine's registry and, if that lacks this build of torch, also from PyTorch's.

    A file whose hash is not in the lock is never installed, whatever the registry.
    """
    locked = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "--requirement", str(lock), *flags)
    try:
        install(*locked)
    except subprocess.CalledProcessError:
        if index is None:
            raise
        install("--extra-index-url", index, *locked)


def install(*what: str) -> None:
    run(*PIP, "install", "--no-compile", "--quiet", *what)


def install_runtime() -> None:
    # Left to itself, pip would fetch any version of the tools that build a wheel.
    with tempfile.TemporaryDirectory() as tools:
        install_locked(BUILD / "locks/build.txt", None, "--target", tools)
        os.environ["PYTHONPATH"] = tools
        install("--no-deps", "--no-build-isolation", "/source")
        del os.environ["PYTHONPATH"]
    compile_all(*site_packages().glob("medusa_*"))
    if not list(site_packages().glob("medusa_runtime/kernels/*.so")):
        sys.exit("the CPU kernels were not compiled; expected gcc in this stage")
    (HOME / "bin/medusa-install").chmod(0o755)


def prune(pattern: str) -> None:
    root = HOME if pattern.startswith("/") else site_packages()
    freed = 0
    for path in sorted(root.glob(pattern.lstrip("/"))):
        freed += size_bytes(path)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    print(f"pruned {freed / 1e6:7.1f} MB  {pattern}", flush=True)


def size_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.lstat().st_size for each in files if each.is_file())


def compile_all(*paths: Path) -> None:
    # With unchecked hashes, an import does not look at a file's time, so copies and layers may change it.
    mode = ("--invalidation-mode", "unchecked-hash", "-j", str(len(os.sched_getaffinity(0))))
    # Packages ship files that no Python compiles (templates, other versions' syntax).
    subprocess.run([PYTHON, "-m", "compileall", "-q", *mode, *map(str, paths)], check=False, stdout=subprocess.DEVNULL)


def keep_gpus(patterns: list[str], gpus: list[int]) -> None:
    """Leave the code for other GPUs out of the libraries, and record which GPUs are left (device/built_for.py)."""
    paths = [path for pattern in patterns for path in sorted(site_packages().glob(pattern)) if not path.is_symlink()]
    gpu_code.slim_all([(str(path.relative_to(site_packages())), path) for path in paths], gpus)
    (HOME / "medusa-gpus.txt").write_text("".join(f"{gpu_code.name_of(gpu)}\n" for gpu in gpus))


def site_packages() -> Path:
    (found,) = HOME.glob("lib/python3*/site-packages")
    return found


def run(*command: str) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
