"""vLLM's engine core, with a place for vLLM's own front end, which is attached after the first token.

vLLM runs its core in a process of its own (``EngineCoreProc``), which front ends reach over two ZMQ sockets each. Here
it runs in our engine's thread. Our requests go to it directly, as client 1, and their outputs come back directly. The
front end is client 0 and uses vLLM's own two threads, which start when it is attached.
"""

from __future__ import annotations

import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from medusa_runtime.engine.serving.inbox import Inbox
from vllm.v1.engine import core as vllm_core

from ..core_request import CLIENT
from ..version import MissingPartError

logger = logging.getLogger(__name__)

_FRONT_END = 0
_ARGUMENTS = {"vllm_config", "local_client", "handshake_address", "executor_class", "log_stats"}
_METHODS = (
    "_perform_handshakes", "process_input_sockets", "process_output_sockets", "_handle_client_request", "has_work",
    "preprocess_add_request",
)  # fmt: skip
# What a core is used by once it has loaded the model, when it is too late for the compatible mode.
_USED = ("step_fn", "post_step", "preprocess_add_request", "add_request", "abort_requests", "scheduler")
_RETRY_S = 0.01
_DETACHED = object()

Outputs = Callable[[Any], None]


class PlainCore(vllm_core.EngineCore):  # type: ignore[misc]
    """The core without a place for a front end, for versions of vLLM in which ``missing_part`` finds none."""

    def __init__(self, config: Any, executor_class: Any, inbox: Inbox, on_outputs: Outputs) -> None:
        self._on_outputs = on_outputs
        super().__init__(config, executor_class, log_stats=False)

    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests() or self.batch_queue)

    def run_step(self) -> bool:
        """Run one step, hand its outputs on, and return whether the model was executed."""
        outputs, executed = self.step_fn()
        self.post_step(executed)
        if outputs and CLIENT in outputs:
            self._on_outputs(outputs[CLIENT])
        return bool(executed)

    def notify_idle(self) -> None: ...


def core_class() -> Any:
    """Return the class of the engine's core: one that takes vLLM's front end, if this version of vLLM allows it."""
    if (missing := missing_part()) is not None:
        logger.warning("vLLM's own routes are not available: this version of vLLM has no %s", missing)
        return PlainCore
    return make_fronted_core()


def check_parts(core: Any) -> None:
    """Raise MissingPartError if a core of this version lacks something that our loop needs."""
    if lacking := [name for name in _USED if not hasattr(core, name)]:
        raise MissingPartError(f"its core has no {lacking[0]}")


def missing_part() -> str | None:
    """Return which part of vLLM a core with a front end needs and this version lacks; None if all are there."""
    base = getattr(vllm_core, "EngineCoreProc", None)
    if base is None:
        return "EngineCoreProc"
    if not hasattr(vllm_core, "EngineZmqAddresses"):
        return "EngineZmqAddresses"
    missing = _ARGUMENTS - set(inspect.signature(base.__init__).parameters)
    missing |= {name for name in _METHODS if not hasattr(base, name)}
    return min(missing, default=None)


def make_fronted_core() -> Any:
    """Return the class. It is not made at import, because another version of vLLM may lack its base class."""

    class FrontedCore(vllm_core.EngineCoreProc):  # type: ignore[misc]
        """The core with a place for a front end."""

        def __init__(self, config: Any, executor_class: Any, inbox: Inbox, on_outputs: Outputs) -> None:
            self._inputs = _Inputs(inbox, self)
            self._outputs = _Outputs(on_outputs)
            self.on_add: Callable[[Any], None] = lambda request: None
            super().__init__(
                vllm_config=config,
                local_client=True,
                handshake_address="",
                executor_class=executor_class,
                log_stats=True,
            )

        # vLLM's constructor makes queues of its own; these take their place.
        input_queue = property(lambda self: self._inputs, lambda self, made: None)
        output_queue = property(lambda self: self._outputs, lambda self, made: None)

        @contextmanager
        def _perform_handshakes(self, *_: Any, **__: Any) -> Iterator[Any]:
            yield vllm_core.EngineZmqAddresses(inputs=[], outputs=[])

        def process_input_sockets(self, *arguments: Any) -> None:
            ready = arguments[-1]
            ready.set()

        def process_output_sockets(self, *_: Any) -> None: ...

        def preprocess_add_request(self, request: Any) -> Any:
            self.on_add(request)
            return super().preprocess_add_request(request)

        def run_step(self) -> bool:
            """Run one step, hand its outputs on, and return whether the model was executed."""
            outputs, executed = self.step_fn()
            for client, each in outputs.items() if outputs else ():
                self._outputs.put((client, each))
            self.post_step(executed)
            if not executed and self.scheduler.has_requests():
                time.sleep(0.001)  # as in vLLM's loop, since the work waits for other threads
            return bool(executed)

        def notify_idle(self) -> None:
            """Complete operations that wait for an idle engine, such as a pause."""
            if notify := getattr(self, "_notify_idle_state_callbacks", None):
                notify()

        def attach_front_end(self, input_address: str, output_address: str) -> Callable[[], None]:
            """Start vLLM's threads for a front end that listens, or soon will, on these ``ipc://`` addresses.

            Call the returned function once the front end listens: that saves the wait until it is noticed.
            """
            ready, listens = threading.Event(), threading.Event()
            identity = self.engine_index.to_bytes(length=2, byteorder="little")
            inputs = partial(super().process_input_sockets, [input_address], None, identity, ready)
            outputs = partial(super().process_output_sockets, [output_address], None, self.engine_index)
            self._inputs.attached = self._outputs.attached = True

            def begin() -> None:
                for address in (input_address, output_address):
                    while not os.path.exists(address.removeprefix("ipc://")):
                        if not self._inputs.attached:
                            return
                        listens.wait(_RETRY_S)  # a connection to nothing is only retried after 100 ms
                        listens.clear()
                threading.Thread(target=outputs, name="vllm-outputs", daemon=True).start()
                inputs()

            threading.Thread(target=begin, name="vllm-inputs", daemon=True).start()
            return listens.set

        def detach_front_end(self) -> None:
            """End vLLM's threads for a front end: the one for outputs now, the one for inputs at the next message."""
            self._inputs.attached = False
            self._outputs.detach()

    return FrontedCore


class _Inputs(queue.Queue[Any]):
    """The front end's messages, as calls to make between two steps."""

    def __init__(self, inbox: Inbox, core: Any) -> None:
        super().__init__()
        self._inbox = inbox
        self._core = core
        self.attached = False

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if not self.attached:
            raise SystemExit  # ends vLLM's thread, which would read messages forever, and closes its socket
        self._inbox.post(lambda: self._core._handle_client_request(*item))


class _Outputs(queue.Queue[Any]):
    """The core's outputs: ours are handed on at once by the stepping thread, the front end's by vLLM's thread."""

    def __init__(self, on_outputs: Outputs) -> None:
        super().__init__()
        self._on_outputs = on_outputs
        self.attached = False

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        # A step's statistics are on its first client's outputs. The front end, if there is one, records them.
        if isinstance(item, tuple) and (item[0] == CLIENT or (not self.attached and item[1].scheduler_stats)):
            outputs = item[1]
            if self.attached and outputs.scheduler_stats is not None:
                stats, outputs.scheduler_stats = outputs.scheduler_stats, None
                super().put((_FRONT_END, vllm_core.EngineCoreOutputs(scheduler_stats=stats)))
            self._on_outputs(outputs)
        elif self.attached:
            super().put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        if item is _DETACHED:
            raise SystemExit  # as for inputs
        return item

    def detach(self) -> None:
        if self.attached:
            self.attached = False
            super().put(_DETACHED)


__all__ = ["PlainCore", "check_parts", "core_class", "missing_part"]
