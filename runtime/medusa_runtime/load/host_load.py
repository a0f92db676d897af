"""Loading on a CPU: a tensor is applied as a view of the region, without a copy wherever that is possible."""

from __future__ import annotations

import time
from collections.abc import Callable

from medusa_runtime.load.applier import Applier
from medusa_runtime.load.backlog import Backlog
from medusa_runtime.load.region_tensors import RegionTensors

_NEXT_TENSOR_S = 0.01  # how long to wait for the next tensor before looking whether others have arrived
_PATIENT_S = 0.05  # the same while bytes come slowly; an arrival ends this wait early


class HostLoad:
    """Applies a backlog's tensors to a module in the host's memory.

    With ``release`` the region's bytes of each copied tensor are dropped, so that no process can load them a second
    time.
    """

    def __init__(self, tensors: RegionTensors, applier: Applier, backlog: Backlog, *, release: bool) -> None:
        self._tensors = tensors
        self._applier = applier
        self._backlog = backlog
        self._release = release

    def run(self, check: Callable[[], None]) -> None:
        """Apply everything in the backlog. ``check`` is called repeatedly, and may raise to end the load."""
        tensors, backlog = self._tensors, self._backlog
        while backlog.pending:
            check()
            for name in backlog.wait_for_arrivals(_NEXT_TENSOR_S, _PATIENT_S):
                place = backlog.pending.pop(name)
                tensor = tensors.tensor(name, keep_codes=self._applier.takes_codes(place))
                start = time.monotonic_ns()
                copied = self._applier.apply(place, tensor)
                backlog.mark_applied(place, start)
                tensors.applied(name, copied=copied, release=self._release)

    def close(self) -> None:
        """Do nothing: what was applied stays."""
