"""From the region to the layers: each tensor is applied when its bytes are there, whatever the others do.

Cicada's Weight Decoupler and its out-of-order application (§3.3, §3.4), and ParaServe's parameter manager (§5.2): the
first forward starts at once and waits unit by unit.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from medusa_runtime.timeline import Timeline
from medusa_runtime.weights.gate import Gate, gates
from medusa_runtime.weights.index import WeightIndex
from medusa_runtime.weights.plan import Place, Rename, plan
from medusa_runtime.weights.region import Region
from medusa_runtime.weights.views import Views

_LOOK_S = 0.05  # how long to wait for the next tensor before looking whether later ones have come
_LOOKAHEAD = 32  # how many tensors behind the next one are looked at; a fetch is seldom further out of order


class Loader:
    """Applies a region's tensors to a module in a thread, and lets a forward through as far as they are applied.

    On a CPU parameters are views of the region: shared between processes and read-only, so **writing to one in place is
    a segmentation fault**; assign a new one. Those of another dtype than ``dtype`` are copies, and so are buffers.
    ``rename`` maps a tensor's name in the checkpoint to the module's, or to None to leave it out; without it the
    module's own ``rename`` is asked, else the names are equal. ``dtype`` None keeps the checkpoint's.
    """

    def __init__(
        self,
        region: Region,
        module: nn.Module,
        *,
        dtype: torch.dtype | None,
        timeline: Timeline | None = None,
        rename: Rename | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._region = region
        self._module = module
        self._dtype = dtype
        self._device = device
        self._timeline = timeline
        self._rename: Rename = rename or getattr(module, "rename", None) or (lambda name: name)
        self._gates = gates(module, timeline)
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="medusa-loader", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all is applied. Raises MismatchError, WeightsError, or what the fetch failed with."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop applying; a forward that still waits raises. What is applied stays. May be called twice."""
        self._closing = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._apply_all(self._wait_index())
        except BaseException as error:  # noqa: BLE001  whatever it is, it must reach those who wait
            self._error = error
        finally:
            for gate in self._gates:
                if not gate.is_open:
                    gate.open(self._error)
                if gate.error is None:
                    gate.remove()

    def _wait_index(self) -> WeightIndex:
        while True:
            self._check_closing()
            try:
                return self._region.wait_index(_LOOK_S)
            except TimeoutError:
                continue

    def _apply_all(self, index: WeightIndex) -> None:
        todo = plan(index, self._module, self._rename)
        waiting = self._assign_gates(todo)
        views = Views(self._region)
        pending = list(todo)
        while pending:
            self._check_closing()
            ready = [name for name in pending[:_LOOKAHEAD] if self._region.has(name)]
            if not ready:
                try:
                    self._region.wait_tensor(pending[0], _LOOK_S)
                except TimeoutError:
                    pass
                continue
            for name in ready:
                self._apply(todo[name], views.tensor(name, index.tensors[name]), waiting)
            if len(ready) == len(pending[:_LOOKAHEAD]):
                del pending[:_LOOKAHEAD]
            else:
                applied = set(ready)
                pending = [name for name in pending if name not in applied]

    def _assign_gates(self, todo: dict[str, Place]) -> dict[nn.Module, list[Gate]]:
        """Which gates wait for a module's own tensors; gates that wait for nothing are opened."""
        waiting: dict[nn.Module, list[Gate]] = {}
        for gate in self._gates:
            for owner in gate.owners:
                waiting.setdefault(owner, []).append(gate)
        for place in todo.values():
            for gate in _gates_of(place, waiting):
                gate.remaining += 1
        for gate in self._gates:
            if not gate.remaining:
                gate.open()
        return waiting

    def _apply(self, place: Place, tensor: Tensor, waiting: dict[nn.Module, list[Gate]]) -> None:
        start = time.monotonic_ns()
        dtype = self._dtype if tensor.is_floating_point() else None
        value = tensor.to(self._device, dtype)
        if place.is_buffer:
            # A buffer may be written to by the forward, so it is never a view.
            value = value.clone() if value is tensor else value
        else:
            value = nn.Parameter(value, requires_grad=False)
        for owner, attribute in place.owners:
            setattr(owner, attribute, value)
        for gate in _gates_of(place, waiting):
            gate.begin_ns = gate.begin_ns or start
            gate.remaining -= 1
            if not gate.remaining:
                gate.open()
                if self._timeline is not None:
                    self._timeline.record("apply", gate.begin_ns, time.monotonic_ns(), unit=gate.name)

    def _check_closing(self) -> None:
        if self._closing:
            raise RuntimeError("the loader was closed before all weights were applied")


def _gates_of(place: Place, waiting: dict[nn.Module, list[Gate]]) -> list[Gate]:
    """Each once, also when tied parameters have several owners in one unit."""
    return list(dict.fromkeys(gate for owner, _ in place.owners for gate in waiting.get(owner, ())))
