"""Loading on a CPU: a tensor is applied as a view of the region, without a copy wherever that can be."""

from __future__ import annotations

import time
from collections.abc import Callable

from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.backlog import Backlog
from medusa_runtime.load.views import Views
from medusa_runtime.region.reader import Region

_POLL_S = 0.01  # how long to wait for the next tensor before looking whether others have arrived


class HostLoad:
    """Applies a backlog's tensors to a module in the host's memory.

    With ``release`` the region's bytes of each copied tensor are dropped, so that nobody can load them a second time.
    """

    def __init__(self, region: Region, applier: Applier, backlog: Backlog, *, release: bool) -> None:
        self._region = region
        self._applier = applier
        self._backlog = backlog
        self._release = release

    def run(self, index: WeightIndex, check: Callable[[], None]) -> None:
        """Apply all of the backlog; ``check`` is called again and again and may raise."""
        views, backlog, region = Views(self._region), self._backlog, self._region
        while backlog.pending:
            check()
            for name in backlog.arrived(_POLL_S):
                place, tensor = backlog.pending.pop(name), views.tensor(name, index.tensors[name])
                start = time.monotonic_ns()
                copied = self._applier.apply(place, tensor)
                backlog.count(place, start)
                if not copied:
                    region.viewed.add(name)
                elif self._release:
                    region.release(name)
                else:
                    region.unmap(name)

    def close(self) -> None:
        """Nothing to do: what was applied stays."""
