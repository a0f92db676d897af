"""An idle engine process. It does everything that needs no model, then waits until it is given one, and serves it.

This is BlitzScale's context pool (§6), and ParaServe's overlapped imports (§5) done before the request.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import socket
import threading
from contextlib import suppress
from dataclasses import replace

from ...config import Settings
from ...device.choice import choose
from ...device.context import DeviceContext
from ...engine.base import Engine
from ...process import ReportPipe
from ...region.reader import Region
from ...registry import engine_kind
from ...timeline import Timeline
from ...zygote import EngineClass, load_engine_class, run_engine
from ..child import close_others
from ..messages import Message, receive, send
from ..shard_files import held_files
from .handover import TAKE_DESCRIPTORS, settings_from_body
from .log_limit import limit_log

_PR_SET_PDEATHSIG = 1
_NICE = 10
# The module that reads bundles, by name: the agent, which forks this process, must not have to import it.
_ATTACH_ARTIFACTS = "medusa_runtime.state.attach_artifacts"


def run_idle(
    engine_class: EngineClass,
    settings: Settings,
    gpu_context: bool,
    channel: socket.socket,
    reports: ReportPipe,
    timeline: Timeline,
) -> int:
    """Warm up, wait for a function, serve it, and end with it. Returns the exit status."""
    close_others(channel.fileno(), reports.write_fd, timeline.fd)
    if settings.device != "cuda":
        _warm_up(engine_class, settings)
    elif gpu_context:
        DeviceContext().wait()
        _warm_up(engine_class, settings)
    importlib.import_module(_ATTACH_ARTIFACTS)
    with suppress(BrokenPipeError):  # the agent has ended, or lost this connection, as is read next
        send(channel, "warm")
    message = receive(channel)
    if message is None:
        return 0  # the agent has ended, or needs no more idle processes
    # From now on this process ends with the function, and no longer with the agent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    # The channel stays open: when it ends, the agent knows that this process has ended.
    return _serve(engine_class, settings.engine, message)


def _warm_up(engine_class: EngineClass, settings: Settings) -> None:
    """Generate with a tiny random model, so that everything that happens once in a process has happened.

    This is done in a thread of low priority, so that functions that start now go first; the process itself keeps its
    priority. It is not idle priority, with which no process would ever be warm on a machine that is never idle.
    """
    if settings.device == "cuda" and not engine_kind(settings.engine).owns_gpu_context:
        return  # has not been tried
    from ...engine.warmup import warm_up

    failures: list[BaseException] = []

    def run() -> None:
        os.nice(_NICE)  # on Linux, this concerns only this thread and those that it starts
        try:
            warm_up(engine_class, settings)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=run, name="warmup")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    gc.collect()
    gc.freeze()


def _serve(engine_class: EngineClass, kind: str, message: Message) -> int:
    limit_log()
    descriptors = dict(zip(TAKE_DESCRIPTORS, message.descriptors, strict=False))
    # The files of a local model, because this process opens no path of a function.
    shard_fds = [file for socket_fd in message.descriptors[len(TAKE_DESCRIPTORS) :] for file in held_files(socket_fd)]
    lease = socket.socket(fileno=descriptors["lease"])
    threading.Thread(target=_end_with, args=(lease,), name="lease", daemon=True).start()
    settings = settings_from_body(message.body["settings"])
    if (gpus := message.body["gpus"]) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # in time, because CUDA has not been initialized here
    settings = replace(settings, device=choose(settings.device, os.environ))
    timeline = Timeline(descriptors["timeline"], "engine")
    timeline.mark("specialise", pid=os.getpid())
    on_gpu = settings.device == "cuda" and engine_kind(settings.engine).owns_gpu_context
    context = DeviceContext(timeline=timeline) if on_gpu else None  # it is made beside what follows
    if settings.engine != kind:  # an engine that this kind of process can become (``EngineKind.warmed_as``)
        with timeline.stage("import"):
            engine_class = load_engine_class(settings)
    if settings.torch_import == "plain":
        importlib.import_module("medusa_runtime.imports.lazy_torch").complete()  # the agent's import may have been lean
    region = Region(descriptors["region"], demand_fd=descriptors["demand"], from_agent=True, shard_fds=shard_fds)
    if (bundle_model := message.body.get("bundle_model")) and settings.state is None:
        state = importlib.import_module(_ATTACH_ARTIFACTS)
        state.attach_artifacts(region, bundle_model, settings, timeline, state.Trust.parse(*message.body["trust"]))
    listener = socket.socket(fileno=descriptors["listener"])
    listener.setblocking(True)
    reports = ReportPipe.of(descriptors["reports"])
    gc.enable()

    def make() -> Engine:
        if context is not None:
            context.wait()  # this error names the GPU that cannot be used; torch's would not
        made: Engine = engine_class(region, settings, timeline)
        return made

    return run_engine(make, listener, timeline=timeline, reports=reports)


def _end_with(lease: socket.socket) -> None:
    """End this process with its function, which holds the other end of the lease."""
    try:
        while lease.recv(1):
            pass
    except OSError:
        pass
    os._exit(0)
