"""The features of this CPU, and those that make torch's own 16-bit products fast."""

from __future__ import annotations

import functools
from pathlib import Path

# With these torch (oneDNN) multiplies 16-bit numbers in hardware; only few rows can be faster with our kernels.
FAST_IN_TORCH = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16"}),
}
NEEDED = frozenset({"avx2", "fma", "f16c"})


@functools.cache
def features() -> frozenset[str]:
    """The first CPU's features, as Linux names them; empty where it lists none (not x86, no /proc)."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            head = file.read(16384).decode("ascii", "replace")  # one CPU's entry: the whole file is slow on large hosts
    except OSError:
        return frozenset()
    for line in head.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
