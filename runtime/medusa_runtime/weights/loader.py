"""From the region to the layers: each tensor is applied when its bytes are there, whatever the others do.

Cicada's Weight Decoupler and its out-of-order application (§3.3, §3.4), and ParaServe's parameter manager (§5.2): the
first forward starts at once and waits unit by unit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from medusa_runtime.timeline import Timeline
from medusa_runtime.weights.awaited import Awaited, await_value
from medusa_runtime.weights.gate import Gate, gates, owner_gates
from medusa_runtime.weights.index import WeightIndex
from medusa_runtime.weights.plan import Place, Rename, places, plan
from medusa_runtime.weights.region import Region
from medusa_runtime.weights.views import Views

_LOOK_S = 0.01  # how long to wait for the next tensor before looking whether others have come
_LOOKAHEAD = 32  # how many tensors behind the next one are looked at; a fetch is seldom further out of order


@dataclass(frozen=True)
class Building:
    """How a module of which nothing else is known is filled: gates on all that owns tensors, and ``Awaited``.

    A tensor keeps the type the module gave it, as with ``load_state_dict``, where the loader's ``dtype`` is None.
    ``initial`` makes the module with initial values, for what the checkpoint lacks (``strict=False``). ``copy``: no
    views. ``release``: the region's bytes of what was copied are dropped; nobody can load them a second time.
    """

    initial: Callable[[], nn.Module]
    strict: bool = True
    copy: bool = False
    release: bool = False
    memory_format: torch.memory_format | None = None


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
        building: Building | None = None,
    ) -> None:
        self._region = region
        self._module = module
        self._dtype = dtype
        self._device = device
        self._timeline = timeline
        self._rename: Rename = rename or getattr(module, "rename", None) or (lambda name: name)
        self._building = building
        self._gates = (gates if building is None else owner_gates)(module, timeline)
        self._pending: dict[str, Place] = {}
        self._urgent: list[Gate] = []  # whose tensors are applied before all others; a forward waits for them
        self._needs: dict[Gate, list[str]] = {}
        if building is not None:
            self._await_values()
        for gate in self._gates:
            gate.ask = self._ask
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

    def _await_values(self) -> None:
        guards = {id(owner): gate for gate in self._gates for owner in gate.owners}
        device = self._device or torch.device("cpu")
        for place in set(places(self._module).values()):
            tensor = place.tensor
            if type(tensor) is nn.Parameter:
                dtype = self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype
                await_value(tensor, guards[id(place.owners[0][0])], dtype, device)

    def _ask(self, gate: Gate) -> None:
        """A forward waits at this gate: have its tensors fetched and applied first (Cicada §3.5)."""
        self._urgent.append(gate)
        names = self._needs.get(gate)
        if names is not None:  # else the index has not come, and nothing is fetched yet
            self._region.ask([name for name in names if name in self._pending])

    def _apply_all(self, index: WeightIndex) -> None:
        building = self._building
        self._pending, missing = plan(index, self._module, self._rename, strict=building is None or building.strict)
        pending = self._pending
        waiting = self._assign_gates(pending, missing)
        if missing:
            self._apply_initial(missing, waiting)
        views = Views(self._region)
        order, behind = list(pending), 0
        while pending:
            self._check_closing()
            while order[behind] not in pending:
                behind += 1
            looked = [*self._awaited(), *order[behind : behind + _LOOKAHEAD]]
            ready = [name for name in dict.fromkeys(looked) if name in pending and self._region.has(name)]
            if not ready:
                try:
                    self._region.wait_tensor(next(name for name in looked if name in pending), _LOOK_S)
                except TimeoutError:
                    pass
                continue
            for name in ready:
                copied = self._apply(pending[name], views.tensor(name, index.tensors[name]), waiting)
                del pending[name]
                if copied and building is not None and building.release:
                    self._region.release(name)

    def _awaited(self) -> list[str]:
        """The tensors that a forward waits for; they are asked for again, should the request have been lost."""
        self._urgent = [gate for gate in self._urgent if not gate.is_open]
        names = [name for gate in self._urgent for name in self._needs.get(gate, ()) if name in self._pending]
        if names:
            self._region.ask(names)
        return names

    def _assign_gates(self, todo: dict[str, Place], missing: list[Place]) -> dict[nn.Module, list[Gate]]:
        """Which gates wait for a module's own tensors; gates that wait for nothing are opened."""
        waiting: dict[nn.Module, list[Gate]] = {}
        for gate in self._gates:
            for owner in gate.owners:
                waiting.setdefault(owner, []).append(gate)
        needs: dict[Gate, list[str]] = {gate: [] for gate in self._gates}
        for name, place in todo.items():
            for gate in _gates_of(place, waiting):
                gate.remaining += 1
                needs[gate].append(name)
        for place in missing:
            for gate in _gates_of(place, waiting):
                gate.remaining += 1
        self._needs = needs
        for gate in self._gates:
            if not gate.remaining:
                gate.open()
        return waiting

    def _apply_initial(self, missing: list[Place], waiting: dict[nn.Module, list[Gate]]) -> None:
        """What the checkpoint lacks has the value it is made with, as after ``load_state_dict(strict=False)``."""
        assert self._building is not None
        fresh = places(self._building.initial())
        for place in missing:
            tensor = fresh[place.name].tensor
            self._apply(place, tensor if is_lazy(tensor) else tensor.detach(), waiting)

    def _apply(self, place: Place, tensor: Tensor, waiting: dict[nn.Module, list[Gate]]) -> bool:
        """Whether the module has a copy, and no view."""
        start = time.monotonic_ns()
        value: Tensor = self._converted(place, tensor)
        if place.is_buffer:
            # A buffer may be written to by the forward, so it is never a view.
            value = value.clone() if value is tensor else value
        elif not is_lazy(value):
            value = nn.Parameter(value, requires_grad=False)
        if isinstance(place.tensor, Awaited) and isinstance(value, nn.Parameter):
            place.tensor.arrived = value
        for owner, attribute in place.owners:
            setattr(owner, attribute, value)
        for gate in _gates_of(place, waiting):
            gate.begin_ns = gate.begin_ns or start
            gate.remaining -= 1
            if not gate.remaining:
                gate.open()
                if self._timeline is not None:
                    self._timeline.record("apply", gate.begin_ns, time.monotonic_ns(), unit=gate.name)
        return is_lazy(value) or value.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()

    def _converted(self, place: Place, tensor: Tensor) -> Tensor:
        building = self._building
        if is_lazy(tensor):
            return tensor
        dtype = self._dtype if tensor.is_floating_point() else None
        if building is None:
            return tensor.to(self._device, dtype)
        # As load_state_dict: the module's type, whatever the file's is.
        own = place.tensor.dtype
        value = tensor.to(self._device, (dtype or own) if own.is_floating_point else own)
        if building.memory_format is not None and value.dim() == 4:
            value = value.contiguous(memory_format=building.memory_format)
        return value.clone() if building.copy and value is tensor else value

    def _check_closing(self) -> None:
        if self._closing:
            raise RuntimeError("the loader was closed before all weights were applied")


def _gates_of(place: Place, waiting: dict[nn.Module, list[Gate]]) -> list[Gate]:
    """Each once, also when tied parameters have several owners in one unit."""
    return list(dict.fromkeys(gate for owner, _ in place.owners for gate in waiting.get(owner, ())))
