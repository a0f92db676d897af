"""The tensors that a load has still to apply: which of them have arrived, and which gates wait for them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import nn

from medusa_runtime.load.gate import Gate
from medusa_runtime.load.plan import Place
from medusa_runtime.load.region_tensors import RegionTensors
from medusa_runtime.timeline import Timeline

_HINT_EVERY_S, _HINTED = 0.01, 256  # how often the prefetcher gets the names of the next tensors, and how many
_LOOKAHEAD = 32  # how many of the next tensors to check; a fetch is seldom further out of order


class Backlog:
    """The pending tensors of a load, in execution order. Those that a forward waits for go first (Cicada §3.5).

    Only the load's thread uses it, except for the demands of gates. A gate opens when the last tensor of its modules is
    counted.
    """

    def __init__(self, tensors: RegionTensors, gates: Sequence[Gate], timeline: Timeline | None) -> None:
        self.pending: dict[str, Place] = {}  # by the tensors' names in the checkpoint
        self.urgent: list[
            str
        ] = []  # the pending tensors that a forward waited for in the last call of ``wait_for_arrivals``
        self.demanding: list[Gate] = []  # the gates at which a forward waits
        self._tensors = tensors
        self._gates = gates
        self._timeline = timeline
        self._waiting: dict[nn.Module, list[Gate]] = {}
        self._needs: dict[Gate, list[str]] = {}
        self._order: list[str] = []
        self._waited = False  # whether the last wait was in vain
        self._next = 0  # index into the order: no tensor before it is pending
        self._hints = False
        self._hint_at = 0.0
        for gate in gates:
            gate.demand = self._demand

    def add(self, todo: dict[str, Place], missing: Sequence[Place], *, hints: bool) -> None:
        """Register everything that a load applies, and open the gates that need no tensor.

        todo: the places to fill, by the tensors' names in the checkpoint, in the order of the plan.
        missing: the places that the checkpoint has no tensor for.
        hints: name the next tensors to the prefetcher, which does not know this order.
        """
        self.pending, self._order, self._hints = todo, list(todo), hints
        for gate in self._gates:
            for owner in gate.owners:
                self._waiting.setdefault(owner, []).append(gate)
        needs: dict[Gate, list[str]] = {gate: [] for gate in self._gates}
        for name, place in todo.items():
            for gate in self._gates_of(place):
                gate.remaining += 1
                needs[gate].append(name)
        for place in missing:
            for gate in self._gates_of(place):
                gate.remaining += 1
        self._needs = needs
        for gate in self._gates:
            if not gate.remaining:
                gate.open()

    def wait_for_arrivals(self, wait_s: float, patient_s: float = 0.0) -> list[str]:
        """Return pending tensors whose bytes have arrived, urgent ones first. If there are none, wait for the next one.

        The wait may end without one, so the list may be empty. ``wait_s`` limits it. After a wait in vain, bytes come
        slowly, and the following waits may take ``patient_s``, if given.
        """
        pending, tensors = self.pending, self._tensors
        fetched_bytes = tensors.fetched_bytes  # read before the check below, so that no arrival after it is slept over
        while self._order[self._next] not in pending:
            self._next += 1
        self.urgent = self._demand_again()
        if self._hints and (now := time.monotonic()) >= self._hint_at:
            self._hint_at = now + _HINT_EVERY_S
            tensors.hint(self._order[self._next : self._next + _HINTED])
        ahead = self._order[self._next : self._next + _LOOKAHEAD]
        candidates = [name for name in dict.fromkeys([*self.urgent, *ahead]) if name in pending]
        found = [name for name in candidates if tensors.has(name)]
        if found:
            self._waited = False
        elif self._waited:  # bytes come slowly: polling for them would take CPU time from the forward
            tensors.wait_for_more(fetched_bytes, patient_s or wait_s)
        else:
            try:
                tensors.wait_tensor(candidates[0], wait_s)
            except TimeoutError:
                self._waited = True
        return found

    def mark_applied(self, place: Place, start_ns: int) -> None:
        """Count a tensor as applied: its gates wait for one tensor less. ``start_ns`` is when applying it began."""
        for gate in self._gates_of(place):
            gate.begin_ns = gate.begin_ns or start_ns
            gate.remaining -= 1
            if not gate.remaining:
                gate.open()
                if self._timeline is not None:
                    self._timeline.record("apply", gate.begin_ns, time.monotonic_ns(), unit=gate.name)

    def _demand(self, gate: Gate) -> None:
        """Have a gate's tensors fetched and applied first, because a forward waits at it."""
        self.demanding.append(gate)
        names = self._needs.get(gate)
        if names is not None:  # else the index has not come, and nothing is fetched yet
            self._tensors.demand([name for name in names if name in self.pending])

    def _demand_again(self) -> list[str]:
        """Return the pending tensors that a forward waits for. Demand them again, in case the first demand was lost."""
        self.demanding = [gate for gate in self.demanding if not gate.is_open]
        names = [name for gate in self.demanding for name in self._needs.get(gate, ()) if name in self.pending]
        if names:
            self._tensors.demand(names)
        return names

    def _gates_of(self, place: Place) -> list[Gate]:
        """Return each gate of a place once, even if a tied parameter has several owners in one unit."""
        return list(dict.fromkeys(gate for owner, _ in place.owners for gate in self._waiting.get(owner, ())))
