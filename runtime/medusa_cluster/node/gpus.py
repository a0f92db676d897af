"""The GPUs of a node. Each is lent to one instance at a time, with all of its memory.

One that is given back is free again once its memory is, as the driver says: the engine that had it may be ending still.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_runtime.device.choice import obstacle
from medusa_runtime.device.nvml import LIBRARY, GpuInfo, Nvml
from medusa_runtime.errors import DeviceError, InstanceError

from ..deployment import Deployment
from ..policy.accelerators import given
from ..policy.state import FreeDevice

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_LOOK_AGAIN_S = 0.1  # while memory is given back
_RETURNS_WITHIN_S = 5.0  # after this, what the driver says of a GPU that was given back is taken for all that comes
_LEFT_BYTES = 1 << 30  # that may be missing then: perhaps a warm process has made a context there
_UNSEEN = FreeDevice(0)
_DEVICE = re.compile(r"nvidia\d+")  # in /dev, for each GPU that this container was given


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
        # Not the driver's list in /proc: a container may see all of the machine's GPUs there.
        count = sum(_DEVICE.fullmatch(path.name) is not None for path in (root / "dev").iterdir()) or 1
    return tuple(map(str, range(count)))


def gpu_environment(names: Sequence[str]) -> dict[str, str]:
    """Return the variables with which the names of GPUs mean the same to every process of the node."""
    return {} if not names or "CUDA_VISIBLE_DEVICES" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@dataclass(eq=False)
class GpuLoan:
    """The GPUs that an instance has until its process has ended, and the variables by which it finds them."""

    holder: str
    names: tuple[str, ...]
    environment: dict[str, str]
    free_bytes: dict[str, int] = field(default_factory=dict)  # of each, before


class Gpus:
    """The GPUs of this node by name, who has each of them, and what the driver says of them, once a second."""

    def __init__(self, names: Sequence[str], link_bytes_per_s: float | None = None, *, library: str = LIBRARY) -> None:
        """``link_bytes_per_s``: what each takes from the host's memory; None: as the driver says."""
        self._names = tuple(names)
        self._link_bytes_per_s = link_bytes_per_s
        self._library = library
        self._loans: dict[str, GpuLoan] = {}  # by GPU
        self._returning: dict[str, tuple[float, int]] = {}  # GPU → when it was given back, and what should be free
        self._seen: dict[str, GpuInfo] = {}  # replaced by the thread that looks, never altered: others iterate over it
        self._seen_at = -math.inf  # when the last look began
        self._lost: frozenset[str] = frozenset()  # those that have fallen off the bus
        self._stop, self._look_now = threading.Event(), threading.Event()

    def begin(self) -> None:
        """Look at the GPUs from now on, in a thread: a call may block for as long as a GPU hangs."""
        if self._names:
            threading.Thread(target=self._look_for_ever, name="gpus", daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        self._look_now.set()

    def lend(self, instance_id: str, deployment: Deployment, device_bytes: int = 0) -> GpuLoan:
        """Lend an instance as many GPUs as it computes on. Raises InstanceError if too few are free.

        They are the smallest with ``device_bytes`` free, or else, and if that is 0, those with the most.
        """
        count = deployment.gpus if self._names and deployment.device != "cpu" else 0
        free = [name for name in self._names if name not in self._loans and name not in self._lost]
        if count > 1:
            free = [name for name in free if not _is_part(name)]
        if len(free) < count:
            holders = ", ".join(sorted({loan.holder for loan in self._loans.values()}))
            raise InstanceError(
                f"expected {count} free GPU{'s' * (count > 1)}, found {len(free)} of {len(self._names)}"
                + (f"; the others are lent to {holders}" if holders else "")
                + (f"; {len(self._lost)} fell off the bus (`nvidia-smi` says which)" if self._lost else "")
            )
        settled = [name for name in free if not self._is_returning(name)]
        free = settled if len(settled) >= count else free
        lent = tuple(free[at] for at in given(list(map(self._free_device, free)), count, device_bytes))
        only = len(self._names) == 1 or not count
        before = {name: max(self._free_bytes(name), self._returning.pop(name, (0.0, 0))[1]) for name in lent}
        loan = GpuLoan(instance_id, lent, {} if only else {"CUDA_VISIBLE_DEVICES": ",".join(lent)}, before)
        self._loans |= dict.fromkeys(lent, loan)
        return loan

    def take_back(self, loan: GpuLoan | None) -> None:
        """End a loan. May be called twice."""
        given_back = [name for name, other in self._loans.items() if other is loan]
        if loan is None or not given_back:
            return
        self._loans = {name: other for name, other in self._loans.items() if other is not loan}
        self._returning |= {name: (time.monotonic(), loan.free_bytes[name]) for name in given_back}
        self._look_now.set()

    def status(self) -> dict[str, Any]:
        """Return the GPUs' part of the node's status. What is not known is left out.

        A GPU that was given back has no part in ``device_free_bytes`` until its memory is free.
        """
        found: dict[str, Any] = {"devices": len(self._names)}
        if any(map(_is_part, self._names)):
            found["devices_apart"] = True
        if lost := [name for name in self._lost if name not in self._loans]:
            found["devices_lost"] = len(lost)
        seen = [info for info in map(self._seen.get, self._names) if info is not None]
        if not seen or any(name not in self._seen and name not in self._lost for name in self._names):
            return found
        found["device_name"] = " and ".join(sorted({info.name for info in seen}))
        answering = [info for name, info in self._seen.items() if name not in self._lost] or seen
        sizes = sorted((info.total_bytes for info in answering), reverse=True)
        if sizes[-1]:
            free = sorted((self._free_device(name) for name in self._names if self._is_free(name)), reverse=True)
            found |= {"device_bytes": sizes[-1], "device_sizes": sizes}
            found["device_free_bytes"] = [one.free_bytes for one in free]
            found["device_free_sizes"] = [one.size_bytes for one in free]
        link = self._link_bytes_per_s or min(info.link_bytes_per_s for info in seen)
        return found | ({"load_bytes_per_s": link} if link else {})

    def _is_free(self, name: str) -> bool:
        return name not in self._loans and name not in self._lost and not self._is_returning(name)

    def _is_returning(self, name: str) -> bool:
        """Return whether a GPU was given back a moment ago, and its memory is not all free yet."""
        if name not in self._returning:
            return False
        at, expected = self._returning[name]
        came_back = self._seen_at > at and self._free_bytes(name) >= expected - _LEFT_BYTES
        if came_back or name not in self._seen or time.monotonic() - at > _RETURNS_WITHIN_S:
            del self._returning[name]
            return False
        return True

    def _free_device(self, name: str) -> FreeDevice:
        return FreeDevice(self._seen[name].free_bytes, self._seen[name].total_bytes) if name in self._seen else _UNSEEN

    def _free_bytes(self, name: str) -> int:
        return self._free_device(name).free_bytes

    def _look_for_ever(self) -> None:
        nvml, failure = None, ""
        while not self._stop.is_set():
            self._look_now.clear()
            began = time.monotonic()
            try:
                nvml = nvml or Nvml(self._library)
                self._take(nvml.gpus(), began)
                failure = ""
            except DeviceError as error:  # what was seen before still holds
                if failure != str(error):
                    failure = str(error)
                    logger.warning("the node's GPUs are not seen: %s", error)
                if nvml is not None:
                    with suppress(DeviceError):
                        nvml.close()
                nvml = None  # after a failure of the driver, it has to be initialized again
            self._look_now.wait(_LOOK_AGAIN_S if self._returning and not failure else _LOOK_S)

    def _take(self, gpus: Sequence[GpuInfo], began: float) -> None:
        found = {name: _named(name, gpus) for name in self._names}
        # Of one that is lost, the driver says no UUID.
        lost = frozenset(name for name, info in found.items() if (name in self._seen if info is None else info.lost))
        if len(lost) != len(self._lost):
            logger.warning("%d of the node's %d GPUs have fallen off the bus", len(lost), len(self._names))
        answering = {name: info for name, info in found.items() if info is not None and not info.lost}
        self._seen = self._seen | answering
        self._lost, self._seen_at = lost, began


def _is_part(name: str) -> bool:
    """Return whether this is a part of a GPU in MIG mode. A process reaches one such part alone."""
    return name.startswith("MIG-")


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
