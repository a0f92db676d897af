"""Reports what the machine has, and whether the driver does what restoring relies on (E0).

A fact that cannot be found does not affect the others.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import Machine

# CUdevice_attribute: whether copies need pinned memory, and what memory at chosen addresses relies on.
_ATTRIBUTES = {
    "PAGEABLE_MEMORY_ACCESS": 88,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 102,
}


def environment(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, fact in _FACTS.items():
        try:
            found[name] = fact(machine)
        except Exception as error:  # noqa: BLE001 - one that fails is a fact, too
            found[name] = f"failed: {type(error).__name__}: {error}"
    return found


def _triton(machine: Machine) -> str:
    import triton

    return str(triton.__version__)


def _bytecode(machine: Machine) -> str:
    """Return whether Python finds torch's bytecode, without which an import of it takes twice as long."""
    kept = torch.__spec__.cached
    return "kept" if kept and Path(kept).exists() else "not kept"


def _driver(machine: Machine) -> str:
    import ctypes

    from medusa_runtime.device.driver import Driver

    version = ctypes.c_int()
    Driver().call("cuDriverGetVersion", ctypes.byref(version))
    return str(version.value)


def _placement(machine: Machine) -> dict[str, object]:
    """Return whether memory can be mapped at the addresses that graphs are captured with."""
    from medusa_runtime.engine.gpu.graph_pool import OTHER_POOL_BASE, POOL_BASE
    from medusa_runtime.engine.gpu.placed_memory import BASE, OTHER_BASE, PlacedMemory
    from medusa_runtime.state.graphs.driver import CudaDriver

    torch.empty(1, device=machine.device)
    found: dict[str, object] = {}
    for base in (BASE, OTHER_BASE, POOL_BASE, OTHER_POOL_BASE):
        memory = PlacedMemory(CudaDriver(), machine.device, base)
        tensor = memory("probe", 64 << 20)
        tensor.fill_(7)
        found[hex(base)] = {
            "at": hex(memory.ranges["probe"].address),
            "writes": bool((tensor == 7).all()),
            "granted": memory.ranges["probe"].address == base,
        }
    return found


def _attributes(machine: Machine) -> dict[str, int]:
    """Return what the driver says of itself: 1 for what it supports here."""
    import ctypes

    from medusa_runtime.device.driver import Driver

    found = {}
    for name, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        Driver().call("cuDeviceGetAttribute", ctypes.byref(value), number, machine.device.index or 0)
        found[name] = value.value
    return found


def _cupti(machine: Machine) -> dict[str, int]:
    """Return how many kernel images CUPTI reports when a product is computed."""
    from medusa_runtime.device.cupti import ModuleRecorder

    with ModuleRecorder() as recorder:
        if recorder.error is not None:
            raise recorder.error
        x = torch.randn(64, 4096, device=machine.device, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        (x @ x.T).relu().sum().item()
        return {"images": len(recorder.images), "bytes": sum(map(len, recorder.images))}


_FACTS: dict[str, Callable[[Machine], Any]] = {
    "device": lambda machine: machine.name,
    "python": lambda _: platform.python_version(),
    "kernel": lambda _: platform.release(),
    "torch": lambda _: torch.__version__,
    "cuda": lambda _: str(torch.version.cuda),
    "cpus": lambda _: len(os.sched_getaffinity(0)),
    "memory_gib": lambda _: int(Path("/proc/meminfo").read_text().split()[1]) >> 20,
    "compiler": lambda _: shutil.which("g++") or shutil.which("gcc"),
    "triton": _triton,
    "bytecode": _bytecode,
    "driver": _driver,
    "attributes": _attributes,
    "placement": _placement,
    "cupti": _cupti,
}
