"""From the region to the layers: each tensor is applied when its bytes are there, whatever the others do.

Cicada's Weight Decoupler and its out-of-order application (§3.3, §3.4), and ParaServe's parameter manager (§5.2): the
first forward starts at once and waits unit by unit. On a CPU to apply a tensor is to make a view of the region; on a
device its place is there first, and it is applied when its copy is done (``upload.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.errors import WeightsError
from medusa_runtime.limits import peak_bytes
from medusa_runtime.load.aliasing import aliased
from medusa_runtime.load.alignment import must_move
from medusa_runtime.load.gate import Gate, gates, owner_gates
from medusa_runtime.load.load_hooks import with_load_hooks
from medusa_runtime.load.pending import arrive, await_value, coming, fill, is_awaitable
from medusa_runtime.load.plan import Place, Rename, places, plan
from medusa_runtime.load.upload import Layout, Link, Uploads, lay_out
from medusa_runtime.load.upload import views as slab_views
from medusa_runtime.load.views import Views
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

_LOOK_S = 0.01  # how long to wait for the next tensor before looking whether others have come
_LOOK_UPLOADING_S = 0.0005  # the same while copies run, whose end is also waited for
_WISH_S, _HINTED = 0.01, 256  # how often, and of how many tensors, the prefetcher is told which are next
_LOOKAHEAD = 32  # how many tensors behind the next one are looked at; a fetch is seldom further out of order


Waiting = dict[nn.Module, list[Gate]]


@dataclass(frozen=True)
class Building:
    """How a module of which nothing else is known is filled: gates on all that owns tensors, and ``PendingParameter``.

    A tensor keeps the type the module gave it, as with ``load_state_dict``, where the loader's ``dtype`` is None.
    ``initial`` makes the module with initial values, for what the checkpoint lacks (``strict=False``). ``copy``: no
    views. ``exact``: none where its address would change the last bits of a result. ``release``: the region's bytes of
    what was copied are dropped; nobody can load them a second time.
    """

    initial: Callable[[], nn.Module]
    strict: bool = True
    copy: bool = False
    exact: bool = True
    release: bool = False
    memory_format: torch.memory_format | None = None
    on_end: Callable[[BaseException | None], None] = lambda _: None  # of the load; with an error that nobody waited for


class Loader:
    """Applies a region's tensors to a module in a thread, and lets a forward through as far as they are applied.

    On a CPU parameters are views of the region: shared between processes and read-only, so **writing to one in place is
    a segmentation fault**; assign a new one. Those of another dtype than ``dtype`` are copies, and so are buffers.
    ``rename`` maps a tensor's name in the checkpoint to the module's, or to None to leave it out; without it the
    module's own ``rename`` is asked, else the names are equal. ``dtype`` None keeps the checkpoint's.

    With a ``link`` the tensors go to its device, all into one ``slab`` (for models of ours, not with ``building``);
    ``release`` drops the region's bytes of each that is there, so that nobody can load them a second time.
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
        link: Link | None = None,
        release: bool = False,
    ) -> None:
        self._region = region
        self._module = module
        self._dtype = dtype
        self._device = device
        self._timeline = timeline
        self._rename: Rename = rename or getattr(module, "rename", None) or (lambda name: name)
        self._building = building
        # What the factory made. What is done to the module later is its user's, and is left as it is.
        self._places = {} if building is None else places(module)
        assert link is None or building is None
        self._link = link
        self._release = release or (building is not None and building.release)
        self.slab: Tensor | None = None
        self.layout: Layout | None = None
        self._placed = threading.Event()
        self._gates = (gates if building is None else owner_gates)(module, timeline)
        self._pending: dict[str, Place] = {}
        self._urgent: list[Gate] = []  # whose tensors are applied before all others; a forward waits for them
        self._needs: dict[Gate, list[str]] = {}
        self._wishes = False  # whether the order of the pending is told to the prefetcher
        self._in_place: set[Place] = set()  # written to where they are, for others look at them there
        self.has_shared = False
        if building is not None:
            self._await_values()
        for gate in self._gates:
            gate.demand = self._demand
        self._closing = self._waited = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="medusa-loader", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all is applied. Raises MismatchError, WeightsError, or what the fetch failed with."""
        self._waited = True
        self._thread.join()
        if self._error is not None:
            raise self._error
        for gate in self._gates:
            gate.wait()  # open, but in a process that was forked from the loader's

    def wait_placed(self) -> None:
        """Until every parameter has its address on the device, whatever is there. Raises as ``wait`` does."""
        self._placed.wait()
        if self._error is not None:
            raise self._error

    @property
    def placed(self) -> bool:
        """Whether ``wait_placed`` would return at once."""
        return self._placed.is_set()

    @property
    def applied(self) -> bool:
        """Whether all weights are there."""
        return not self._thread.is_alive() and self._error is None

    def names(self) -> dict[int, str]:
        """The checkpoint's name of each tensor that a built module has, by the tensor's id. Only after ``wait``."""
        found: dict[int, str] = {}
        for name in self._region.wait_index().order:
            target = self._rename(name)
            place = None if target is None else self._places.get(target)
            if place is None:
                continue
            for owner, attribute in place.owners:
                held: dict[str, Any] = owner._buffers if place.is_buffer else owner._parameters
                found.setdefault(id(held.get(attribute)), name)
        return found

    def close(self) -> None:
        """Stop applying; a forward that still waits raises. What is applied stays. May be called twice."""
        self._closing = True
        self._thread.join()
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            index = self._wait_index()
            with self._stage("load") as detail:
                self._apply_all(index)
                # What the process has taken at most so far, its views of the region included; and the region itself.
                detail |= {"peak_bytes": peak_bytes(), "region_peak_bytes": self._region.peak_bytes}
        except BaseException as error:  # noqa: BLE001  whatever it is, it must reach those who wait
            self._error = error
        finally:
            self._placed.set()
            for gate in self._gates:
                if not gate.is_open:
                    gate.open(self._error)
            if self._building is not None:
                self._building.on_end(None if self._waited or self._closing else self._error)

    def _stage(self, name: str) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext({}) if self._timeline is None else self._timeline.stage(name)

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
        elsewhere = aliased(place.tensor for place in self._places.values() if is_awaitable(place.tensor))
        self.has_shared = bool(elsewhere)
        for place in set(self._places.values()):
            tensor = place.tensor
            if is_lazy(tensor):
                continue
            if place.is_buffer or id(tensor) in elsewhere or not is_awaitable(tensor):
                self._in_place.add(place)
            if is_awaitable(tensor) and id(tensor) not in elsewhere:
                dtype = self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype
                await_value(tensor, guards[id(place.owners[0][0])], dtype, device)

    def _demand(self, gate: Gate) -> None:
        """A forward waits at this gate: have its tensors fetched and applied first (Cicada §3.5)."""
        self._urgent.append(gate)
        names = self._needs.get(gate)
        if names is not None:  # else the index has not come, and nothing is fetched yet
            self._region.demand([name for name in names if name in self._pending])

    def _apply_all(self, index: WeightIndex) -> None:
        with self._stage("plan"):
            missing, waiting = self._plan(index)
        if missing:
            self._apply_initial(missing, waiting)
        if self._region.released_elsewhere:
            raise WeightsError(
                "the weights were released by a process that has ended (--host-weights release); start the instance "
                "again, or keep the host's copy"
            )
        if self._link is None:
            self._apply_views(index, waiting)
        else:
            self._upload(index, waiting, self._link)

    def _plan(self, index: WeightIndex) -> tuple[list[Place], Waiting]:
        building = self._building
        expected = self._places or places(self._module)
        rename = self._rename if building is None else with_load_hooks(self._module, index, self._rename)
        strict, built = building is None or building.strict, building is not None
        self._pending, missing = plan(index, expected, rename, strict=strict, built=built)
        if building is not None and not index.recorded:
            # Nobody knows in which order a forward goes; it was constructed in one that is seldom another.
            rank = {name: number for number, name in enumerate(self._places)}
            self._pending = dict(sorted(self._pending.items(), key=lambda item: rank[item[1].name]))
            self._wishes = True
        waiting = self._assign_gates(self._pending, missing)
        return missing, waiting

    def _apply_views(self, index: WeightIndex, waiting: Waiting) -> None:
        views, arrivals = Views(self._region), _Arrivals(self, _LOOK_S)
        while self._pending:
            self._check_closing()
            for name in arrivals.ready():
                copied = self._apply(self._pending.pop(name), views.tensor(name, index.tensors[name]), waiting)
                if not copied:
                    self._region.viewed.add(name)
                elif self._release:
                    self._region.release(name)
                else:
                    self._region.unmap(name)

    def _upload(self, index: WeightIndex, waiting: Waiting, link: Link) -> None:
        """Like ``_apply_views`` over a link: begin what has come, and apply what has arrived there."""
        views, arrivals, uploads = Views(self._region), _Arrivals(self, _LOOK_UPLOADING_S), Uploads(link)
        places, sources, begun_ns = dict(self._pending), dict[str, Tensor](), dict[str, int]()
        targets = self._place(link)
        while self._pending or uploads:
            self._check_closing()
            must_wait = not self._pending or not uploads.has_room
            for name in uploads.pause(self._check_closing) if must_wait else uploads.finished():
                self._count(places[name], begun_ns[name], waiting)
                source = sources.pop(name)
                if self._release:
                    link.forget(source)
                    del source
                    self._region.release(name)
            for name in arrivals.ready() if self._pending else ():
                del self._pending[name]
                begun_ns[name] = time.monotonic_ns()
                sources[name] = views.tensor(name, index.tensors[name])
                uploads.begin(name, targets[name], sources[name], urgent=name in arrivals.urgent)
                if not uploads.has_room:
                    break

    def _place(self, link: Link) -> dict[str, Tensor]:
        """Where on the device each tensor goes; the parameters are there from now on."""
        layout = self.layout = lay_out(self._pending, self._module, self._dtype)
        slab = self.slab = link.memory("weights", layout.size_bytes)
        targets = slab_views(slab, layout, self._pending)
        for name, place in self._pending.items():
            self._assign(place, self._as_parameter(place, targets[name]))
        self._placed.set()
        return targets

    def _awaited(self) -> list[str]:
        """The tensors that a forward waits for; they are asked for again, should the request have been lost."""
        self._urgent = [gate for gate in self._urgent if not gate.is_open]
        names = [name for gate in self._urgent for name in self._needs.get(gate, ()) if name in self._pending]
        if names:
            self._region.demand(names)
        return names

    def _assign_gates(self, todo: dict[str, Place], missing: list[Place]) -> Waiting:
        """Which gates wait for a module's own tensors; gates that wait for nothing are opened."""
        waiting: Waiting = {}
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

    def _apply_initial(self, missing: list[Place], waiting: Waiting) -> None:
        """What the checkpoint lacks has the value it is made with, as after ``load_state_dict(strict=False)``."""
        fresh: dict[str, Place] = {}
        for place in missing:
            with torch._C.DisableTorchFunctionSubclass():
                value = None if place.tensor.is_meta or is_lazy(place.tensor) else place.tensor.detach()
            if value is None and not fresh:
                assert self._building is not None
                fresh = places(self._building.initial())
            tensor = fresh[place.name].tensor if value is None else value
            self._apply(place, tensor if is_lazy(tensor) else tensor.detach(), waiting)

    def _apply(self, place: Place, tensor: Tensor, waiting: Waiting) -> bool:
        """Whether the module has a copy, and no view."""
        start = time.monotonic_ns()
        value: Tensor = self._converted(place, tensor)
        filled = place in self._in_place and fill(place.tensor, value)
        if place.is_buffer and not filled and _same_memory(value, tensor):
            value = value.clone()  # it may be written to by the forward, so it is never a view
        value = self._assign(place, place.tensor if filled else self._as_parameter(place, value))
        self._count(place, start, waiting)
        return filled or is_lazy(value) or not _same_memory(value, tensor)

    def _as_parameter(self, place: Place, value: Tensor) -> Tensor:
        if place.is_buffer or is_lazy(value):
            return value
        # Whether it wants a gradient changes how torch multiplies, and so last bits, also where nobody asks for one.
        return nn.Parameter(value, self._building is not None and place.tensor.requires_grad)

    def _assign(self, place: Place, value: Tensor) -> Tensor:
        if coming(place.tensor) is not None:
            value = arrive(place.tensor, value)
        for owner, attribute in place.owners:
            held: dict[str, Any] = owner._buffers if place.is_buffer else owner._parameters
            if held.get(attribute) is place.tensor:  # else its user has put something else there
                held[attribute] = value
        return value

    def _count(self, place: Place, start_ns: int, waiting: Waiting) -> None:
        """One tensor less for its gates to wait for."""
        for gate in _gates_of(place, waiting):
            gate.begin_ns = gate.begin_ns or start_ns
            gate.remaining -= 1
            if not gate.remaining:
                gate.open()
                if self._timeline is not None:
                    self._timeline.record("apply", gate.begin_ns, time.monotonic_ns(), unit=gate.name)

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
        elif not (place.is_buffer or is_lazy(place.tensor)):
            value = _laid_out_as(place.tensor, value)
        must_copy = building.copy or (building.exact and must_move(value))
        return value.clone() if must_copy and _same_memory(value, tensor) else value

    def _check_closing(self) -> None:
        if self._closing:
            raise RuntimeError("the loader was closed before all weights were applied")


class _Arrivals:
    """Which of a loader's pending tensors are there: those that a forward waits for first, then in order."""

    def __init__(self, loader: Loader, look_s: float) -> None:
        self._loader = loader
        self._look_s = look_s
        self._order = list(loader._pending)
        self._behind = 0
        self._wish_at = 0.0
        self.urgent: list[str] = []

    def ready(self) -> list[str]:
        """Waits a moment when none is."""
        pending, region = self._loader._pending, self._loader._region
        while self._order[self._behind] not in pending:
            self._behind += 1
        self.urgent = self._loader._awaited()
        if self._loader._wishes and (now := time.monotonic()) >= self._wish_at:
            self._wish_at = now + _WISH_S
            region.hint(self._order[self._behind : self._behind + _HINTED])
        ahead = self._order[self._behind : self._behind + _LOOKAHEAD]
        looked = [name for name in dict.fromkeys([*self.urgent, *ahead]) if name in pending]
        found = [name for name in looked if region.has(name)]
        if not found:
            try:
                region.wait_tensor(looked[0], self._look_s)
            except TimeoutError:
                pass
        return found


def _laid_out_as(like: Tensor, value: Tensor) -> Tensor:
    """``value`` as ``load_state_dict`` leaves it: in the module's own memory format, which changes last bits."""
    if like.stride() == value.stride():
        return value
    pairs = zip(like.shape, like.stride(), value.stride(), strict=True)
    if all(size == 1 or own == found for size, own, found in pairs):  # torch reads the format of a 1x1 kernel from them
        return value.as_strided(like.shape, like.stride(), value.storage_offset())
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty_like(like, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _gates_of(place: Place, waiting: Waiting) -> list[Gate]:
    """Each once, also when tied parameters have several owners in one unit."""
    return list(dict.fromkeys(gate for owner, _ in place.owners for gate in waiting.get(owner, ())))
