"""Run the tests of imports under several versions of Python, each in an environment of its own below out/.

An interpreter is python3.X of the PATH, or that of pyenv or uv. One that is missing is named, as is one whose packages
(gigabytes, where torch has no build for CPUs) are not installed in time; the run fails for these only where
CI_PYTHONS=all asks for all.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = [
    "tests/runtime/imports",
    "tests/handler/test_lean_flask.py",
    "tests/handler/server/test_lean_gunicorn.py",
    "tests/runtime/load/test_private_names.py",
]
PACKAGES = ["pytest", "pytest-timeout", "pytest-xdist", "numpy"]
INSTALL_S = 300


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


def install(folder: Path, python: str, *, limit_s: float | None) -> None:
    """Make an environment in ``folder`` with the torch that ``TORCH`` names.

    Raises TimeoutExpired: torch and its packages were not there after ``limit_s`` seconds.
    """
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, os.environ.get("TORCH", "torch==2.13.0"), *PACKAGES], check=True, timeout=limit_s)
    subprocess.run([*pip, "-e", str(ROOT)], check=True)
    (folder / "ready").touch()


def passes(folder: Path) -> bool:
    command = [str(folder / "bin/python"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    workers = str(len(os.sched_getaffinity(0)))
    return subprocess.run([*command, "-n", workers, *TESTS], cwd=ROOT, check=False).returncode == 0


def main(versions: list[str]) -> int:
    all_asked = os.environ.get("CI_PYTHONS") == "all"
    missing, failed, passed = {}, [], []
    for version in versions:
        python = interpreter(version)
        if python is None:
            missing[version] = f"expected python{version} on the PATH, in pyenv or uv, found none"
            continue
        print(f"== Python {version}: {python}", flush=True)
        folder = ROOT / "out" / f"python{version}"
        try:
            if not (folder / "ready").exists():
                install(folder, python, limit_s=None if all_asked else INSTALL_S)
        except subprocess.TimeoutExpired:
            missing[version] = f"its packages were not installed after {INSTALL_S} s"
            shutil.rmtree(folder)
            continue
        (passed if passes(folder) else failed).append(version)
    for version, reason in missing.items():
        print(f"== Python {version} is not tested: {reason}")
    print(f"== passed: {', '.join(passed) or 'none'}; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed) or (bool(missing) and all_asked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
