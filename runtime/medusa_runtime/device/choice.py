"""Chooses CPU or GPU from files alone, so that a process which must not touch CUDA can call it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import DeviceError

_ROOT = Path("/")
_NODES = ("dev/nvidiactl", "dev/dxg")  # NVIDIA's driver; WSL's
_HIDDEN = ("", "-1", "NoDevFiles")


def choose(asked: str, environ: Mapping[str, str], *, root: Path = _ROOT, torch: Path | None = None) -> str:
    """Return ``cpu`` or ``cuda`` for what was asked: ``auto``, ``cpu`` or ``cuda``.

    Raises DeviceError when ``cuda`` is asked for and cannot be used.
    """
    if asked == "cpu":
        return "cpu"
    found = obstacle(environ, root, torch)
    if found is None:
        return "cuda"
    if asked == "cuda":
        raise DeviceError(f"--device cuda cannot be used: {found}; or use --device cpu")
    return "cpu"


def obstacle(environ: Mapping[str, str], root: Path = _ROOT, torch: Path | None = None) -> str | None:
    """Why no GPU can be used here, with what to do; None when one can."""
    if not any((root / node).exists() for node in _NODES):
        return "expected a GPU's device files (/dev/nvidiactl), found none; give the container a GPU"
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in _HIDDEN:
        return f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r} hides all GPUs"
    cuda = _cuda_of(torch or _installed_torch())
    return None if cuda else "expected a torch built for CUDA, found one for CPUs; install torch from its CUDA index"


def _installed_torch() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _cuda_of(torch: Path | None) -> str | None:
    """The CUDA version that a torch was built for, from its version.py: importing torch would take a second."""
    try:
        text = (torch / "version.py").read_text() if torch is not None else ""
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None
