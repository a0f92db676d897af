"""Where the compiled library is. It lies in ``kernels``, whose import would import torch."""

from __future__ import annotations

from pathlib import Path

LIBRARY = Path(__file__).with_name("kernels") / "libmedusa_kernels.so"

__all__ = ["LIBRARY"]
