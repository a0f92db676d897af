"""The fingerprint of a process: what materialized graphs are valid for."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_int
from pathlib import Path

from .driver import CudaDriver
from .mismatch import GraphMismatch, Reason

# Libraries whose kernels are in the graphs, or that choose kernels.
_LIBRARIES = ("libtorch_cuda.so", "libcublas.so", "libcublasLt.so", "libcudnn", "libcudart.so")
_DRIVER_BUILD = Path("/proc/driver/nvidia/version")
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _PROCESSORS = 75, 76, 16


def fingerprint(driver: CudaDriver, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the GPU, the driver, the CUDA libraries in this process, and what the caller adds, such as the model."""
    device = driver.current_device()
    name = ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, len(name), device)
    version = c_int()
    driver.call("cuDriverGetVersion", byref(version))

    def attribute(number: int) -> int:
        value = c_int()
        driver.call("cuDeviceGetAttribute", byref(value), number, device)
        return value.value

    found = {
        "gpu": name.value.decode(),
        "gpu.capability": f"{attribute(_CAPABILITY_MAJOR)}.{attribute(_CAPABILITY_MINOR)}",
        "gpu.processors": str(attribute(_PROCESSORS)),
        "driver": str(version.value),
    }
    if _DRIVER_BUILD.exists():
        found["driver.build"] = _DRIVER_BUILD.read_text().partition("\n")[0]
    for library, path in sorted(mapped_libraries().items()):
        if library.startswith(_LIBRARIES):
            found[f"library.{library}"] = str(path.stat().st_size)
    return {**found, **(extra or {})}


def mapped_libraries() -> dict[str, Path]:
    """Return the paths of the shared libraries in this process, by file name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line[line.find("/") :] for line in lines if "/" in line}  # a library has several mappings
    paths = [Path(file) for file in files if ".so" in file.rpartition("/")[2]]
    return {path.name: path for path in paths}


def check_fingerprint(recorded: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise GraphMismatch if two fingerprints differ. It names the GPU first, then the driver, then anything else."""
    differing = [key for key in sorted({*recorded, *here}) if recorded.get(key) != here.get(key)]
    # Many libraries are loaded at their first use, so only those that are loaded in both processes count.
    differing = [key for key in differing if not key.startswith("library.") or {key} <= recorded.keys() & here.keys()]
    if not differing:
        return
    kinds = {"gpu": Reason.GPU, "driver": Reason.DRIVER}
    key = next((key for kind in kinds for key in differing if key.partition(".")[0] == kind), differing[0])
    reason = kinds.get(key.partition(".")[0], Reason.LIBRARY)
    raise GraphMismatch(reason, f"made for {key} {recorded.get(key, 'none')}, this is {here.get(key, 'none')}")
