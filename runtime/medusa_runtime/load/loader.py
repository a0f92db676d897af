"""The way from the region to the layers: each tensor is applied when its bytes have arrived, in any order.

This is Cicada's Weight Decoupler with its out-of-order application (§3.3, §3.4), and ParaServe's parameter manager
(§5.2): the first forward starts at once and waits unit by unit. On a CPU a tensor becomes a view of the region
(``host_load.py``). On a device its address is there first, and it is applied when its copy is done (``upload/``).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.container_limits import peak_bytes
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.backlog import Backlog
from medusa_runtime.load.copies import check_memory, copied_bytes
from medusa_runtime.load.gate import Gate
from medusa_runtime.load.host_load import HostLoad
from medusa_runtime.load.plan import Plan
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

if TYPE_CHECKING:
    from medusa_runtime.load.upload.device_load import DeviceLoad
    from medusa_runtime.load.upload.link import Link
    from medusa_runtime.load.upload.slab import Slab

_CLOSING_CHECK_S = 0.01  # how often a load that waits for the index checks whether it was closed


class Loader:
    """Applies a region's tensors to a module in a thread, and lets a forward through as far as they are applied.

    On a CPU parameters are views of the region: shared between processes and read-only, so **writing to one in place is
    a segmentation fault**; assign a new one. Parameters whose dtype is converted are copies, and so are all buffers.

    With a ``link`` the tensors go to its device, all into one slab: that of another loader, ``beside``, whose
    applier has made room for them, or else one of this loader's own. With ``release`` the region's bytes of each copied
    tensor are dropped, so that no process can load them a second time. ``on_end`` is called at the end, in the loader's
    thread, with the error if loading failed and nothing has called ``wait``, else with None.
    """

    def __init__(
        self,
        region: Region,
        applier: Applier,
        *,
        timeline: Timeline | None = None,
        link: Link | None = None,
        release: bool = False,
        beside: Loader | None = None,
        on_end: Callable[[BaseException | None], None] = lambda _: None,
    ) -> None:
        self._region = region
        self._tensors = tensors = applier.tensors(region)
        self._applier = applier
        self._timeline = timeline
        self._release = release
        self._on_end = on_end
        self._placed = threading.Event()
        self._gates = applier.gates(timeline)
        self._backlog = Backlog(tensors, self._gates, timeline)
        self._upload: DeviceLoad | None = None
        if link is not None:
            from medusa_runtime.load.upload.device_load import DeviceLoad

            self._upload = DeviceLoad(
                tensors,
                applier,
                self._backlog,
                link,
                release=release,
                on_placed=self._placed.set,
                wait_slab=None if beside is None else beside.wait_slab,
            )
        self._load = self._upload or HostLoad(tensors, applier, self._backlog, release=release)
        self._closing = self._waited = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="medusa-loader", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all weights are applied. Raises MismatchError, WeightsError, or what the fetch failed with."""
        self._waited = True
        self._thread.join()
        if self._error is not None:
            raise self._error
        for gate in self._gates:
            gate.wait()  # all are open, except in a process that was forked during the load: there this raises

    def wait_placed(self) -> None:
        """Wait until every parameter has its address on the device, with or without its value. Raises like ``wait``."""
        self._placed.wait()
        if self._error is not None:
            raise self._error

    def wait_slab(self) -> Slab:
        """Wait like ``wait_placed``, and return the device memory that the weights lie in. Needs a ``link``."""
        self.wait_placed()
        assert self._upload is not None
        assert self._upload.slab is not None
        return self._upload.slab

    @property
    def placed(self) -> bool:
        """Whether ``wait_placed`` would return at once."""
        return self._placed.is_set()

    @property
    def applied(self) -> bool:
        """Whether all weights are applied."""
        return not self._thread.is_alive() and self._error is None

    def is_loaded(self, unit: str) -> bool:
        """Return whether a unit of the module, and all units inside it, have all their weights.

        ``unit`` is its qualified name. One without a gate counts as loaded.
        """
        return all(gate.is_open and gate.error is None for gate in self._gates_inside.get(unit, ()))

    @cached_property
    def _gates_inside(self) -> dict[str, list[Gate]]:
        """The gates of each unit and of those inside it, which are thousands in a mixture of experts."""
        found: dict[str, list[Gate]] = {}
        for gate in self._gates:
            for unit in itertools.accumulate(gate.name.split("."), "{}.{}".format):
                found.setdefault(unit, []).append(gate)
        return found

    @property
    def index(self) -> WeightIndex:
        """The index of the tensors that are applied, after a wait for it. It lists a quantized weight as one tensor."""
        return self._tensors.wait_index()

    def names(self) -> dict[int, str]:
        """Return the checkpoint's name of each tensor of the module, by the tensor's id. Only valid after ``wait``."""
        return self._applier.names(self._tensors.wait_index())

    def close(self) -> None:
        """Stop applying. A forward that still waits raises; what is applied stays. May be called twice."""
        self._closing = True
        self._thread.join()
        self._load.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            index = self._wait_index()
            with self._stage("load") as detail:
                self._apply_all(index)
                # The most memory so far that the process has taken, including its views of the region, and the region.
                detail |= {"peak_bytes": peak_bytes(), "region_peak_bytes": self._region.peak_bytes}
        except BaseException as error:  # noqa: BLE001  every error must reach the threads that wait
            self._error = error
        finally:
            self._placed.set()
            for gate in self._gates:
                if not gate.is_open:
                    gate.open(self._error)
            self._on_end(None if self._waited or self._closing else self._error)

    def _wait_index(self) -> WeightIndex:
        while True:
            self._check_closing()
            try:
                return self._tensors.wait_index(_CLOSING_CHECK_S)
            except TimeoutError:
                continue

    def _apply_all(self, index: WeightIndex) -> None:
        with self._stage("plan"):
            plan = self._applier.plan(index)
            self._backlog.add(*plan, hints=self._applier.hints(index))
        for place, value in zip(plan.missing, self._applier.initial_values(plan.missing), strict=True):
            start = time.monotonic_ns()
            self._applier.apply(place, value)
            self._backlog.mark_applied(place, start)
        if self._upload is None:
            self._check_memory(index, plan)
        self._region.check_whole()
        if self._release and (unneeded := self._applier.unneeded(index, plan.todo)):
            self._tensors.release_unread(unneeded)
        self._load.run(self._check_closing)

    def _check_memory(self, index: WeightIndex, plan: Plan) -> None:
        """Raise TooLargeError if there is no memory for the copies that the plan needs."""
        copied = copied_bytes(index, plan.todo, self._applier)
        # With ``release``, what is copied leaves the region.
        to_come = 0
        if index.region_bytes and not self._release:
            progress = self._region.progress()  # its total leaves out chunks without tensors, which do not come
            to_come = max(progress.total_bytes - progress.fetched_bytes, 0)
        stages = [] if self._timeline is None else self._timeline.stages()
        is_first = [stage.name for stage in stages].count("plan") <= 1
        check_memory(copied, to_come, is_first=is_first, check=self._check_closing)

    def _stage(self, name: str) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext({}) if self._timeline is None else self._timeline.stage(name)

    def _check_closing(self) -> None:
        if self._closing:
            raise RuntimeError("the loader was closed before all weights were applied")
