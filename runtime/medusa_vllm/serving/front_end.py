"""vLLM's HTTP server, unchanged, as a thread of the engine's process: its own ``AsyncLLM`` over our running core.

It is mounted once the engine has given its first token, or when a request needs it. It does not listen on any port:
connections are handed to it.
"""

from __future__ import annotations

import asyncio
import logging
import pkgutil
import socket
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

from medusa_runtime.errors import ConfigError, EngineError, MedusaError
from medusa_runtime.imports.gc_paused import gc_paused
from medusa_runtime.timeline import Timeline

from ..imports import keep_log_levels, server_is_imported
from ..lean_imports import avoid_cache_folder, import_real_modules, without_torch_compile
from ..templates import limit_templates
from .lean_server import lean_server
from .mounting import (
    cache_config_description,
    cache_method,
    cache_template_probe,
    declare_no_processor,
    freeze_without_collection,
    front_configuration,
    load_processors,
    notify_on_socket,
    reuse_configuration,
    share_read_tokenizer,
    single_tokenizer_copy,
)
from .prebuilt import arguments_for, quiet_uvicorn, return_app, take_app
from .replacement import cached_entry_points
from .statistics import Statistics

logger = logging.getLogger(__name__)

# A server has started after so many rounds of its event loop, unless its middleware waits; then it is checked so often.
_START_ROUNDS, _START_CHECK_S = 50, 0.002
_KEEP_ALIVE_S = 75


class ServedModel(NamedTuple):
    """The model that a front end serves, and how.

    core: the engine's core, of ``serving.core``.
    folder: returns the folder with the checkpoint's small files, which the engine keeps.
    executor_class: the class of executor that the core was started with.
    names: the names by which requests may ask for the model. The first is the one in answers.
    words: the flags of ``vllm serve``.
    limit_grammars: has callers' grammars tried within limits before vLLM's backend, by name, compiles them.
    statistics: the engine's metrics, to which the front end's are added; None if flags want none.
    """

    core: Any
    folder: Callable[[], Path]
    executor_class: Any
    max_model_len: int
    names: tuple[str, ...]
    words: list[str]
    limit_grammars: Callable[[str], None]
    statistics: Statistics | None


class FrontEnd:
    """vLLM's server. ``open`` mounts it, once. Any thread but the engine's may call it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._lock = threading.Lock()
        self._error: MedusaError | None = None
        self._up = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accept: Callable[[socket.socket], Any] | None = None
        self._thread: threading.Thread | None = None
        self._end: Callable[[], Any] | None = None

    def open(self, served: ServedModel) -> Callable[[socket.socket], None]:
        """Mount the server, once, and return a function that takes a connection. Raises EngineError and ConfigError."""
        with self._lock:
            if not self._up.is_set() and self._error is None:
                with self._timeline.stage("vllm_server"), gc_paused():
                    self._thread = threading.Thread(target=self._run, args=(served,), name="vllm-server", daemon=True)
                    self._thread.start()
                    self._up.wait()
        if self._error is not None:
            raise self._error
        return self._accept_connection

    def close(self) -> None:
        """End a server that is no longer used, and everything that was started for it."""
        if self._thread is not None and self._loop is not None and self._end is not None:
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join()

    def _accept_connection(self, connection: socket.socket) -> None:
        assert self._loop is not None
        assert self._accept is not None
        connection.setblocking(False)
        asyncio.run_coroutine_threadsafe(self._accept(connection), self._loop)

    def _run(self, served: ServedModel) -> None:
        try:
            asyncio.run(self._serve(served))
        except MedusaError as error:
            logger.error("vLLM's HTTP server could not be started: %s", error)  # noqa: TRY400 - one line says it
            self._error = error
        except BaseException as error:
            logger.exception("vLLM's HTTP server failed")
            self._error = EngineError(f"vLLM's HTTP server could not be started: {type(error).__name__}: {error}")
        finally:
            if self._error is None:
                self._error = EngineError("vLLM's HTTP server has ended; try again")
            self._up.set()

    async def _serve(self, served: ServedModel) -> None:
        async with AsyncExitStack() as mounted:
            with nullcontext() if server_is_imported() else lean_server():
                app, arguments = await _build(served, mounted)
            await self._listen(app, arguments)
        return_app(app)

    async def _listen(self, app: Any, arguments: Any) -> None:
        """Run the server until ``close``."""
        import uvicorn

        quiet_uvicorn()
        settings = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_keep_alive=_KEEP_ALIVE_S, ws="none",
            h11_max_incomplete_event_size=arguments.h11_max_incomplete_event_size,
        )  # fmt: skip
        server = uvicorn.Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[]))
        with freeze_without_collection():
            pauses = chain(repeat(0.0, _START_ROUNDS), repeat(_START_CHECK_S))
            while not server.started:
                if serving.done():
                    raise EngineError("vLLM's HTTP server ended while it started; its log says why")
                await asyncio.sleep(next(pauses))
        loop = self._loop = asyncio.get_running_loop()

        async def accept(connection: socket.socket) -> None:
            def protocol() -> Any:
                return settings.http_protocol_class(
                    config=settings, server_state=server.server_state, app_state=server.lifespan.state
                )

            await loop.connect_accepted_socket(protocol, connection)

        self._accept = accept
        self._end = partial(setattr, server, "should_exit", True)
        self._up.set()
        await serving


async def _end(client: Any, core: Any) -> None:
    """Detach a client from the core, and end it."""
    core.detach_front_end()
    await client.engine_core.abort_requests_async(["none"])  # a message, at which its reading thread ends
    client.shutdown()


async def _build(served: ServedModel, mounted: AsyncExitStack) -> tuple[Any, Any]:
    """Import vLLM's server, and return its app for this model, and the values of the flags.

    The app's client is attached to the core until ``mounted`` is closed.
    """
    with without_torch_compile(), avoid_cache_folder(), keep_log_levels():
        import_real_modules()
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.v1.engine.async_llm import AsyncLLM

        folder = served.folder()
        arguments = arguments_for(served.words, str(folder))
    if arguments.served_model_name is None:
        arguments.served_model_name = list(served.names)
    _import_plugins(arguments)
    mounted.callback(limit_templates().close)
    config = front_configuration(
        served.core.vllm_config,
        str(folder),
        name=arguments.served_model_name,
        generation_config=arguments.generation_config,
        max_model_len=served.max_model_len,
    )
    # In `vllm serve` both are one object. vLLM sets the parser of gpt-oss there, and its routes need it.
    theirs, ours = arguments.structured_outputs_config, config.structured_outputs_config
    theirs.reasoning_parser = theirs.reasoning_parser or ours.reasoning_parser
    served.limit_grammars(config.structured_outputs_config.backend)
    addresses = {name: f"ipc://{folder}/{name.removesuffix('_address')}" for name in _ADDRESSES}
    listens = served.core.attach_front_end(addresses["input_address"], addresses["output_address"])
    mounted.callback(served.core.detach_front_end)
    declare_no_processor(config, folder)
    generation = cache_method(config.model_config, "try_get_generation_config")
    with (
        generation,
        cached_entry_points(),
        reuse_configuration(config),
        single_tokenizer_copy(),
        share_read_tokenizer(),
    ):
        with notify_on_socket(listens):
            client = AsyncLLM(
                config,
                served.executor_class,
                log_stats=served.statistics is not None,
                log_requests=arguments.enable_log_requests,
                stat_loggers=None if served.statistics is None else [served.statistics.logger_factory()],
                client_addresses=addresses,
            )
        mounted.push_async_callback(_end, client, served.core)
        tasks = await client.get_supported_tasks()
        app = take_app(arguments, tasks, client.model_config)
        load_processors(config.model_config)
        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in _NOT_SERVED]
        with cache_method(config, "compute_hash"), cache_config_description(), cache_template_probe():
            arguments.model = served.names[0]  # shown in /v1/models, where the folder's path means nothing to clients
            await init_app_state(client, app.state, arguments, tasks)
    return app, arguments


# With these routes, any caller could stop the model; and its core cannot scale to other processes.
_NOT_SERVED = ("/scale_elastic_ep", "/is_scaling_elastic_ep")
_ADDRESSES = ("input_address", "output_address")


def _import_plugins(arguments: Any) -> None:
    """Import what flags name, and check the parsers' names, as vLLM's launcher does and its app does not.

    Raises ConfigError for middleware that cannot be imported, which only the app would import.
    """
    from vllm.entrypoints.launchers import launcher
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for name in arguments.middleware:
        try:
            pkgutil.resolve_name(":".join(name.rsplit(".", 1)))
        except Exception as error:  # importing a user's module may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"--middleware: expected the path of a class or function, found {name!r}: {reason}"
            ) from error
    if arguments.tool_parser_plugin:
        ToolParserManager.import_tool_parser(arguments.tool_parser_plugin)
    if arguments.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(arguments.reasoning_parser_plugin)
    if check := getattr(launcher, "validate_api_server_args", None):
        check(arguments)


__all__ = ["FrontEnd", "ServedModel"]
