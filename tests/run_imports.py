"""Run the tests of imports under several versions of Python, each in an environment of its own below out/.

An interpreter is python3.X of the PATH, or that of pyenv or uv. One that is missing is named; the run fails for it only
where CI_PYTHONS=all asks for all.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ["tests/runtime/imports/test_lazy_torch.py", "tests/runtime/load/test_private_names.py"]
PACKAGES = ["pytest", "pytest-timeout", "numpy"]


def interpreter(version: str) -> str | None:
    """The newest of that version which starts and can make an environment."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    found = sorted(glob.glob(f"{glob.escape(pyenv)}/versions/{version}.*/bin/python"), reverse=True)
    for name in (shutil.which(f"python{version}"), *found, _from_uv(version)):
        if name is not None and _starts(name, version):
            return name
    return None


def _from_uv(version: str) -> str | None:
    if shutil.which("uv") is None:
        return None
    ran = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=False)
    return ran.stdout.strip() or None if ran.returncode == 0 else None


def _starts(name: str, version: str) -> bool:
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    ran = subprocess.run([name, "-c", code], capture_output=True, text=True, check=False)
    return ran.stdout.strip() == version


def run(version: str, python: str) -> bool:
    """Whether the tests pass under this Python, with the torch that ``TORCH`` names."""
    folder = ROOT / "out" / f"python{version}"
    own = str(folder / "bin" / "python")
    torch = os.environ.get("TORCH", "torch==2.13.0")
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        install = [own, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        subprocess.run([*install, torch, *PACKAGES], check=True)
        subprocess.run([*install, "-e", str(ROOT)], check=True)
        (folder / "ready").touch()
    ran = subprocess.run([own, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS], cwd=ROOT, check=False)
    return ran.returncode == 0


def main(versions: list[str]) -> int:
    missing, failed, passed = [], [], []
    for version in versions:
        python = interpreter(version)
        if python is None:
            missing.append(version)
            continue
        print(f"== Python {version}: {python}", flush=True)
        (passed if run(version, python) else failed).append(version)
    for version in missing:
        print(f"== Python {version} is not tested: expected python{version} on the PATH, in pyenv or uv, found none")
    print(f"== passed: {', '.join(passed) or 'none'}; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed) or (bool(missing) and os.environ.get("CI_PYTHONS") == "all"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
