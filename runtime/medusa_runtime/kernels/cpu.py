"""The features of this CPU, and those that make torch's own 16-bit products fast."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

# With these features torch (oneDNN) multiplies 16-bit numbers in hardware, and our kernels can be faster only for few
# rows. fp32 needs none of them.
FAST_IN_TORCH = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16"}),
    "float32": frozenset(),
}
# Dot products of bf16, which our kernels use, too.
DOTS = frozenset({"avx512_bf16", "bf16"})
AVX512_DOTS = frozenset({"avx512_bf16", "avx512bw", "avx512vl", "avx512vbmi"})  # what our kernels need for them
_AARCH64 = os.uname().machine == "aarch64"
NEEDED = frozenset({"asimd"}) if _AARCH64 else frozenset({"avx2", "fma", "f16c"})
# From Linux's <asm/hwcap.h> for aarch64: the entry of the auxiliary vector, the bit, and the name in /proc/cpuinfo.
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAPS = ((_AT_HWCAP, 1 << 1, "asimd"), (_AT_HWCAP, 1 << 20, "asimddp"), (_AT_HWCAP2, 1 << 14, "bf16"))


@functools.cache
def features() -> frozenset[str]:
    """Return the names that Linux gives to the features of this CPU.

    On x86 these are all of its features, on aarch64 those that the kernels use, and elsewhere none.
    """
    if _AARCH64:
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
        return frozenset(name for entry, bit, name in _HWCAPS if getauxval(entry) & bit)
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            head = file.read(16384).decode("ascii", "replace")  # one CPU's entry: the whole file is slow on large hosts
    except OSError:
        return frozenset()
    for line in head.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
