"""Choose between CPU and GPU by looking at files only, so that a process that must not touch CUDA can do it."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from ..config import Settings
from ..errors import DeviceError

logger = logging.getLogger(__name__)

_ROOT = Path("/")
_NODES = ("dev/nvidiactl", "dev/dxg")  # of NVIDIA's driver, and of WSL
_HIDDEN = ("", "-1", "NoDevFiles")
# Settings that are read on one kind of device alone, and how the engines' names begin for which that is so.
_ONE_DEVICE = (
    ("graphs", "cuda", ""),
    ("host_weights", "cuda", ""),
    ("threads", "cpu", "torch"),
    ("kernels", "cpu", "vllm"),
)


def choose(asked: str, environ: Mapping[str, str], *, root: Path = _ROOT, torch: Path | None = None) -> str:
    """Return ``cpu`` or ``cuda``. ``asked`` is ``auto``, ``cpu`` or ``cuda``.

    Raises DeviceError if ``cuda`` is asked for and cannot be used. ``torch`` is the folder of torch's package.
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
    """Return why no GPU can be used here, and what to do; None if one can be used."""
    if not any((root / node).exists() for node in _NODES):
        return "expected a GPU's device files (/dev/nvidiactl), found none; give the container a GPU"
    if environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in _HIDDEN:  # CUDA ignores what follows
        return f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r} hides all GPUs"
    return (
        None
        if installed_cuda(torch)
        else "expected a torch built for CUDA, found one for CPUs; install torch from its CUDA index"
    )


def warn_without_effect(settings: Settings) -> None:
    """Log which settings have another value than by default, and no effect on ``settings.device``."""
    unset = Settings()
    for name, device, engine in _ONE_DEVICE:
        value = getattr(settings, name)
        if device != settings.device and value != getattr(unset, name) and settings.engine.startswith(engine):
            here, there = ("a CPU", "GPUs") if settings.device == "cpu" else ("a GPU", "CPUs")
            logger.warning("--%s %s has no effect on %s; it is for %s", name.replace("_", "-"), value, here, there)


def installed_cuda(torch: Path | None = None) -> str | None:
    """Return the CUDA version that torch was built for, or None. ``torch`` is the folder of its package.

    It is read from version.py, as an import takes a second.
    """
    if torch is None:
        spec = importlib.util.find_spec("torch")
        torch = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    try:
        text = (torch / "version.py").read_text() if torch is not None else ""
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None
