"""The GPUs of a node. Each is lent to one instance at a time, with all of its memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_runtime.device.choice import obstacle
from medusa_runtime.device.nvml import LIBRARY, GpuInfo, Nvml
from medusa_runtime.errors import DeviceError, InstanceError

from ..deployment import Deployment

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(
    environ: Mapping[str, str], *, root: Path = Path("/"), torch: Path | None = None, library: str = LIBRARY
) -> tuple[str, ...]:
    """Return the names of the GPUs on which instances here can compute, as CUDA_VISIBLE_DEVICES takes them.

    They are numbers in the order of PCI addresses, or UUIDs where a GPU is in MIG mode, or else the words of
    CUDA_VISIBLE_DEVICES. None where engines would choose the CPU; ``torch`` is the folder of torch's package.
    """
    if obstacle(environ, root, torch) is not None:
        return ()
    if given := environ.get("CUDA_VISIBLE_DEVICES"):
        words = [word.strip() for word in given.split(",")]
        return tuple(dict.fromkeys(words[: words.index("-1")] if "-1" in words else words))
    try:
        with closing(Nvml(library)) as nvml:  # the node server is forked afterwards
            found = nvml.gpus()
        if any(gpu.is_part for gpu in found):  # by numbers, CUDA reaches one part alone
            return tuple(gpu.uuid for gpu in found if not gpu.lost)
        count = len(found)
    except DeviceError as error:
        logger.warning("the memory of this machine's GPUs is not known, and counts as large enough: %s", error)
        try:
            count = len(list((root / _DRIVER.relative_to("/")).iterdir()))
        except OSError:
            count = 1
    return tuple(map(str, range(count)))


def gpu_environment(names: Sequence[str]) -> dict[str, str]:
    """Return the variables with which the names of GPUs mean the same to every process of the node."""
    return {} if not names or "CUDA_VISIBLE_DEVICES" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@dataclass(eq=False)
class GpuLoan:
    """The GPUs that an instance has until its process has ended, and the variables by which it finds them."""

    holder: str
    environment: dict[str, str]


class Gpus:
    """The GPUs of this node by name, who has each of them, and what the driver says of them, once a second."""

    def __init__(self, names: Sequence[str], link_bytes_per_s: float | None = None, *, library: str = LIBRARY) -> None:
        """``link_bytes_per_s``: what each takes from the host's memory; None: as the driver says."""
        self._names = tuple(names)
        self._link_bytes_per_s = link_bytes_per_s
        self._library = library
        self._loans: dict[str, GpuLoan] = {}  # by GPU
        self._seen: dict[str, GpuInfo] = {}
        self._lost = 0  # how many the log has named so far
        self._stop = threading.Event()

    def begin(self) -> None:
        """Look at the GPUs from now on, in a thread: a call may block for as long as a GPU hangs."""
        if self._names:
            threading.Thread(target=self._look, name="gpus", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def lend(self, instance_id: str, deployment: Deployment) -> GpuLoan:
        """Lend an instance as many GPUs as it computes on. Raises InstanceError if too few are free."""
        count = deployment.gpus if self._names and deployment.device != "cpu" else 0
        usable = self._usable()
        free = [name for name in usable if name not in self._loans]
        if count > 1:
            free = [name for name in free if not name.startswith("MIG-")]  # a process reaches one such part alone
        if len(free) < count:
            holders = ", ".join(sorted({loan.holder for loan in self._loans.values()}))
            lost = len(self._names) - len(usable)
            raise InstanceError(
                f"expected {count} free GPU{'s' * (count > 1)}, found {len(free)} of {len(self._names)}"
                + (f"; the others are lent to {holders}" if holders else "")
                + (f"; {lost} fell off the bus (`nvidia-smi` says which)" if lost else "")
            )
        lent = sorted(free, key=lambda name: (-self._free_bytes(name), self._names.index(name)))[:count]
        only = len(self._names) == 1 or not count
        loan = GpuLoan(instance_id, {} if only else {"CUDA_VISIBLE_DEVICES": ",".join(lent)})
        self._loans |= dict.fromkeys(lent, loan)
        return loan

    def take_back(self, loan: GpuLoan | None) -> None:
        """End a loan. May be called twice."""
        self._loans = {name: other for name, other in self._loans.items() if other is not loan}

    def status(self) -> dict[str, Any]:
        """Return the GPUs' part of the node's status. What is not known is left out."""
        usable = self._usable()
        found: dict[str, Any] = {"devices": len(usable)}
        seen = [info for info in map(self._seen.get, usable) if info is not None]
        if not seen or len(seen) < len(usable):
            return found
        found["device_name"] = " and ".join(sorted({info.name for info in seen}))
        if total := min(info.total_bytes for info in seen):
            free = [self._free_bytes(name) for name in usable if name not in self._loans]
            found |= {"device_bytes": total, "device_free_bytes": sorted(free, reverse=True)}
        link = self._link_bytes_per_s or min(info.link_bytes_per_s for info in seen)
        return found | ({"load_bytes_per_s": link} if link else {})

    def _usable(self) -> list[str]:
        """Return the GPUs that the driver has not lost, as far as is known."""
        return [name for name in self._names if name not in self._seen or not self._seen[name].lost]

    def _free_bytes(self, name: str) -> int:
        return self._seen[name].free_bytes if name in self._seen else 0

    def _look(self) -> None:
        nvml, failure = None, ""
        while not self._stop.wait(0.0 if nvml is None and not failure else _LOOK_S):
            try:
                nvml = nvml or Nvml(self._library)
                gpus = nvml.gpus()
                self._seen = {name: info for name in self._names if (info := _named(name, gpus)) is not None}
                if (lost := len(self._names) - len(self._usable())) != self._lost:
                    self._lost = lost
                    logger.warning("%d of the node's %d GPUs have fallen off the bus", lost, len(self._names))
            except DeviceError as error:
                self._seen = {}
                if failure != str(error):
                    failure = str(error)
                    logger.warning("the node's GPUs are not seen: %s", error)


def _named(name: str, gpus: Sequence[GpuInfo]) -> GpuInfo | None:
    """Return the GPU that CUDA_VISIBLE_DEVICES would call by this name: by its number, or how its UUID begins.

    None if that is not known. CUDA's own order begins with the fastest GPU, and may be another one than that of PCI
    addresses where GPUs differ.
    """
    if name.isdecimal():
        alike = len({(gpu.name, gpu.total_bytes) for gpu in gpus if not gpu.lost}) <= 1
        by_address = not os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        return gpus[int(name)] if int(name) < len(gpus) and (alike or by_address) else None
    return next((gpu for gpu in gpus if gpu.uuid.startswith(name)), None)


__all__ = ["GpuLoan", "Gpus", "gpu_environment", "visible_gpus"]
