"""The GPUs that an image was built for. Its libraries lack the machine code for others (docs/images.md)."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import DeviceError

_FILE = "medusa-gpus.txt"  # images/install.py writes it


def built_for() -> list[str] | None:
    """Return compute capabilities, such as ``["9.0"]``, or None if no machine code was left out."""
    try:
        return Path(sys.prefix, _FILE).read_text().split()
    except FileNotFoundError:
        return None


def check_gpu(name: str, capability: str) -> None:
    """Raise DeviceError if this image was not built for GPUs of this compute capability, such as ``9.0``.

    Otherwise CUDA would report later, at some kernel, that there is no kernel image.
    """
    gpus = built_for()
    if gpus is not None and capability not in gpus:
        raise DeviceError(
            f"expected a GPU of compute capability {' or '.join(gpus)}, for which this image was built, found {name} "
            f"of {capability}; use an image that was built with GPU={capability}, or without GPU="
        )
