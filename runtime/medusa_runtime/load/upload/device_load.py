"""Loading onto a device: every tensor has its address at once, and is applied when its copy is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.backlog import Backlog
from medusa_runtime.load.region_tensors import RegionTensors
from medusa_runtime.load.upload.link import Link
from medusa_runtime.load.upload.slab import Slab, lay_out
from medusa_runtime.load.upload.uploads import Uploads

_NEXT_TENSOR_S = 0.0005  # how long to wait for the next tensor before looking for copies that are done


class DeviceLoad:
    """Copies a backlog's tensors over a link into one slab on the device.

    ``on_placed`` is called when every parameter has its address. With ``release`` the region's bytes of each copied
    tensor are dropped, so that no process can load them a second time. ``wait_slab`` returns the slab of another load
    of the same module, which has room for these tensors; without it, this load allocates one.
    """

    def __init__(
        self,
        tensors: RegionTensors,
        applier: Applier,
        backlog: Backlog,
        link: Link,
        *,
        release: bool,
        on_placed: Callable[[], None],
        wait_slab: Callable[[], Slab] | None = None,
    ) -> None:
        self._tensors = tensors
        self._applier = applier
        self._backlog = backlog
        self._link = link
        self._release = release
        self._on_placed = on_placed
        self._wait_slab = wait_slab
        self.slab: Slab | None = None

    def run(self, check: Callable[[], None]) -> None:
        """Upload and apply everything in the backlog. ``check`` is called repeatedly, and may raise to end the load."""
        tensors, uploads, backlog = self._tensors, Uploads(self._link), self._backlog
        places, begun_ns = dict(backlog.pending), dict[str, int]()
        targets = self._place(tensors.wait_index())
        while backlog.pending or uploads:
            check()
            must_wait = not backlog.pending or not uploads.has_room
            for name in uploads.wait(check) if must_wait else uploads.finished():
                backlog.mark_applied(places[name], begun_ns[name])
                if self._release:
                    tensors.applied(name, copied=True, release=True)
            for name in backlog.wait_for_arrivals(_NEXT_TENSOR_S) if backlog.pending else ():
                del backlog.pending[name]
                begun_ns[name] = time.monotonic_ns()
                uploads.begin(
                    name,
                    targets[name],
                    tensors.tensor(name),
                    urgent=name in backlog.urgent,
                    stored=tensors.file_range(name),
                )
                if not uploads.has_room:
                    break
        self.close()  # nothing else is copied: its threads and pinned memory are not kept while the engine runs

    def close(self) -> None:
        """Wait for the copies that run. May be called twice."""
        self._link.close()

    def _place(self, index: WeightIndex) -> dict[str, Tensor]:
        """Assign every parameter its address on the device, and return these targets by the tensors' names."""
        applier, pending = self._applier, self._backlog.pending
        if self._wait_slab is not None:
            slab = self.slab = self._wait_slab()
        else:
            layout = lay_out(applier.room_for(index, pending), applier.module, applier.dtype)
            slab = self.slab = Slab(self._link.allocate("weights", layout.size_bytes), layout)
        targets = slab.views(pending)
        for name, place in pending.items():
            applier.assign(place, applier.as_parameter(place, targets[name]))
        self._on_placed()
        return targets
