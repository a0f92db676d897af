"""The leader of a group of vLLM workers. It has the requests and vLLM's scheduler, and will hold the whole model.

    scheduler ─call▶ every worker     rank 0 is another process, so that this one can load all layers
              ─hidden▶ 1 ─hidden▶ … ─tokens▶ scheduler

When its node has the whole model, and the group's file says so, the leader makes a second core in this process, which
takes over the requests with their tokens so far. The same happens when a worker is lost, or if no group is formed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from medusa_runtime.config import Settings
from medusa_runtime.errors import EngineError, MedusaError, RequestError
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kv_plan import KvPlan
from medusa_runtime.timeline import Timeline
from medusa_vllm.engine import VllmEngine
from medusa_vllm.resumption import resume
from medusa_vllm.version import MISSING_PART_ERRORS

from ..fetch_throttle import FetchThrottle
from ..forming import form
from ..plan import GroupPlan, PlanFile
from .configuration import RankConfig, layers_of, rank_config

if TYPE_CHECKING:
    from .executor import Calls

logger = logging.getLogger(__name__)

_POLL_S = 0.25  # between two checks of the region and the group's file


class VllmLeader(VllmEngine):
    """The engine of the leader; see the module."""

    mounts_at_start = False

    def __init__(self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan) -> None:
        self.plan = plan
        self.link = plan.emulated_link()
        self._layers = layers_of(region, settings)
        self._rank_config: RankConfig | None = None
        self._calls: Calls | None = None  # None: this engine is alone
        self._rank_zero_pid = 0  # the process of rank 0
        self._alone = threading.Event()
        self._closing = threading.Event()
        self._began_ns = 0  # when the first forward began; 0 once its tokens have come
        self._core_thread: threading.Thread | None = None
        self._second_core: Any = None  # the second core, or the error that making it ended with
        super().__init__(region, settings, timeline)
        self._throttle = FetchThrottle(region, self._rank_zero_loaded, full=True, layers=self._layers)

    def stats(self) -> dict[str, Any]:
        return super().stats() | {"workers": 1 if self._calls is None else self.plan.size}

    def open_http(self) -> Callable[[socket.socket], None]:
        """Open vLLM's own server. It needs the core that stays, so this waits until the engine is alone."""
        self._wait_loaded()
        while not self._alone.wait(_POLL_S):
            if self._closing.is_set():
                raise RequestError("the engine is stopping")
        return super().open_http()

    def close(self) -> None:
        self._closing.set()
        self._throttle.release()
        self._dissolve(1)
        if self._core_thread is not None:
            self._core_thread.join()
        super().close()

    def _on_configured(self, plan: KvPlan) -> None:
        self._rank_config = rank_config(
            self.config, self._arguments, self._layers, self.plan, plan, self._region, self._settings, self._timeline
        )

    def _rank_zero_loaded(self) -> bool:
        calls = self._calls
        return calls is not None and calls.connections.workers[0].loaded

    # The methods from here on run in the thread of ``run``, unless they say otherwise.

    def _open_core(self) -> Any:
        """Return a core over the group, or if no group is formed, an instance's core."""
        try:
            core = self._form()
        except (MedusaError, *MISSING_PART_ERRORS) as error:
            self._dissolve(1)
            self._go_alone(f"no group was formed: {error}")
            self._alone.set()
            return super()._open_core()
        threading.Thread(target=self._follow_plan, name="group-plan", daemon=True).start()
        return core

    def _form(self) -> Any:
        from medusa_vllm.serving.core import PlainCore

        from .executor import Calls, GroupExecutor

        assert self._rank_config is not None
        identity = self._rank_config.identity
        self._start_rank_zero()
        with self._timeline.stage("form", size=self.plan.size):
            workers = form(self.plan, None, lambda: identity, self.link, self._closing.is_set)
            self._calls = Calls(workers, self.plan, self._timeline, all_loaded=self._all_loaded)
        with self._timeline.stage("core", workers=self.plan.size):
            core = PlainCore(
                self._rank_config.config, partial(GroupExecutor, calls=self._calls), self._inbox, self._handle
            )
            self._watch(core)
        return core

    def _start_rank_zero(self) -> None:
        """Fork rank 0 in a new thread, because a thread that has computed with OpenMP cannot fork."""
        from .rank import fork_rank_zero

        started = threading.Event()
        rank_config, plan, link, timeline = self._rank_config, self.plan, self.link, self._timeline
        assert rank_config is not None

        def run() -> None:  # the thread stays while the child lives, which would end with it
            pid = self._rank_zero_pid = fork_rank_zero(rank_config, plan, link, timeline)
            started.set()
            os.waitpid(pid, 0)

        threading.Thread(target=run, name="group-first", daemon=True).start()
        started.wait()

    def _first_forward(self, start_ns: int) -> None:
        if self._calls is None:
            super()._first_forward(start_ns)
        else:
            self._began_ns = start_ns  # its end is noted later, with its tokens

    def _handle(self, outputs: Any) -> None:
        if self._began_ns:
            super()._first_forward(self._began_ns)
            self._began_ns = 0
        super()._handle(outputs)

    def _step(self) -> None:
        if self._calls is None:
            super()._step()
            return
        from .executor import BrokenGroupError

        self._throttle.note_step()
        try:
            super()._step()
        except BrokenGroupError as error:
            self._fall_back(str(error))
        except Exception as error:  # noqa: BLE001 - after any error, another core can go on
            broken = self._calls.broken
            self._fall_back(str(broken or f"a step failed: {type(error).__name__}: {error}"))

    def _check_broken(self) -> None:
        """Fall back if the group has broken while it had nothing to do."""
        if self._calls is not None and self._calls.broken is not None:
            self._fall_back(str(self._calls.broken))

    def _fall_back(self, reason: str) -> None:
        """Go on alone with all requests, from their prompts and tokens so far."""
        self._dissolve(self.plan.size if self.plan.then == "up" else 1)
        self._go_alone(reason)
        if self._core_thread is None:
            self._make_second_core()
        else:
            self._core_thread.join()
        self._take_over()

    def _go_alone(self, reason: str) -> None:
        logger.warning("%s; going on alone with all layers", reason)
        self._timeline.mark("alone", reason=reason)
        self._throttle.release()

    def _dissolve(self, keep: int) -> None:
        """Dissolve the group. Can be called in any thread."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.release(keep)
        if self._rank_zero_pid:
            try:
                os.kill(self._rank_zero_pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._rank_zero_pid = 0

    # From the group to one instance.

    def _follow_plan(self) -> None:
        """Once this node has the whole model, do what the group's file says. Runs in a thread of its own."""
        assert self._settings.group is not None
        file, marked = PlanFile(self._settings.group, self.plan), False
        while not self._closing.wait(_POLL_S) and self._calls is not None:
            self._inbox.post(self._check_broken)
            if self._region.progress().state != "done":
                continue
            if not marked:
                marked = True
                self._timeline.mark("full")
            plan = file.reload()
            if plan.then != "stay" and self._core_thread is None:
                keep = (plan.keep or plan.size) if plan.then == "up" else 1
                self._core_thread = threading.Thread(
                    target=self._prepare_second_core, args=(keep,), name="group-second"
                )
                self._core_thread.start()

    def _prepare_second_core(self, keep: int) -> None:
        """Make the second core while the group serves. Runs in a thread of its own."""
        began_ns = time.monotonic_ns()
        self._make_second_core()
        self._inbox.post(lambda: self._consolidate(keep, began_ns))

    def _make_second_core(self) -> None:
        try:
            self._second_core = super()._open_core()
            self._structured.install_in(self._second_core)
        except Exception as error:  # noqa: BLE001 - the thread of ``run`` raises it
            self._second_core = error

    def _consolidate(self, keep: int, began_ns: int) -> None:
        """Let the second core, which is ready, take over the requests between two steps."""
        if self._calls is None:
            return  # a worker was lost meanwhile, so it has taken over already
        now_ns = time.monotonic_ns()
        tokens = sum(len(one.tokens) for one in self._requests.unfinished())
        self._timeline.record("gather", began_ns, now_ns, tokens=tokens, bytes=0)
        self._timeline.mark("consolidated", kept=keep)
        self._dissolve(keep)
        self._throttle.release()
        self._take_over()

    def _take_over(self) -> None:
        """Give the second core all requests with their tokens so far. The first core's steps under way are dropped."""
        core, self._second_core = self._second_core, None
        if isinstance(core, Exception):
            raise core
        first, self._core = self._core, core
        begun = set(first.scheduler.requests)  # others wait in the inbox
        first.scheduler.shutdown()
        for sequence in self._requests.unfinished():
            if sequence.cancelled or sequence.id not in begun:
                continue
            try:
                resume(core, sequence, vocab_size=self._vocab_size)
            except (ValueError, *MISSING_PART_ERRORS) as error:
                lost = EngineError(f"this request could not be taken over from the group: {error}; try again")
                self._requests.end(sequence, "error", lost)
        self._alone.set()

    def _all_loaded(self) -> bool:
        """Return whether all of the group's layers are loaded. Called in a thread of the connections."""
        calls = self._calls
        if calls is not None and calls.connections.loaded:
            self._throttle.group_loaded = True
        return self._throttle.group_loaded


__all__ = ["VllmLeader"]
