"""`medusa serve`: read the settings, serve, and show the start on the terminal."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from medusa_runtime.config import OPTIONS, Option, Settings, from_env
from medusa_runtime.errors import ConfigError
from medusa_runtime.registry import is_remote

from ..platforms.base import load, resolve
from . import serving_process
from .flags import add_model, misspelt, model_argument
from .progress import ProgressLine

if TYPE_CHECKING:
    from medusa_runtime.instance import InstanceHandle
    from medusa_runtime.region.reader import Progress
    from medusa_runtime.timeline import Stage


_LONGEST_STAGES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a model or a function. Every flag has an environment variable; the flag wins. "
        "With --engine vllm, flags of vllm serve follow behind --."
    )
    add_model(parser)
    parser.add_argument("--reload", action="store_true", help="start again when the handler's code changes")
    add_settings(parser, [option for option in OPTIONS if option.field != "model"])


def add_settings(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add a flag for each of these settings."""
    defaults = Settings()
    for option in options:
        default = getattr(defaults, option.field)
        shown = (
            ""
            if default is None
            else f"; default: {default:g}"
            if isinstance(default, float)
            else f"; default: {default}"
        )
        parser.add_argument(
            option.flag,
            dest=option.field,
            metavar=option.form,
            help=f"{option.help} [{option.variable}{shown}]".replace("%", "%%"),
        )


# Flags that not all engines read, with those that do. Their variables may be set in an image, for any engine.
_ENGINES_OF_FLAGS = {
    "compile": ("vllm",),
    "kernels": ("vllm",),
    "tensor_parallel": ("vllm",),
    "vllm_mode": ("vllm",),
    "host_weights": ("torch", "vllm"),
    "cluster": ("cluster",),
    "cluster_token_file": ("cluster",),
}


def run(arguments: argparse.Namespace) -> int:
    flags = {option.field: getattr(arguments, option.field) for option in OPTIONS}
    try:
        os.getcwd()
    except OSError as error:  # gunicorn needs it, and so do relative paths
        raise ConfigError(f"the working directory cannot be used ({error.strerror}); start in another one") from None
    try:
        settings = resolve_settings(os.environ, flags | {"model": model_argument(arguments)})
        settings = with_engine_flags(settings, arguments.engine_flags)
        serving_process.check(settings)  # before anything is printed: it may execute this command anew
    finally:
        for variable, meant in misspelt(os.environ):
            print(f"WARNING: {variable} is no setting and has no effect; did you mean {meant}?", file=sys.stderr)
    warn_of_unread_flags(flags, settings.engine)
    if arguments.reload:
        from .reload import serve_with_reload

        return serve_with_reload(sys.argv[1:], settings.handler)
    from medusa_runtime.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    serving_process.log_use(settings.engine, settings.snapshots, settings.device)
    from medusa_runtime.instance import serve

    observer = LoggedStart() if settings.log_format == "json" else Console(sys.stdout)
    return serve(settings, _run_function_process, observer)


def warn_of_unread_flags(flags: Mapping[str, Any], engine: str) -> None:
    """Print a warning for each flag that was given, and that only other engines read."""
    for field, readers in _ENGINES_OF_FLAGS.items():
        if flags.get(field) is not None and not engine.startswith(readers):
            flag, those = f"--{field.replace('_', '-')}", " and ".join(readers)
            print(f"WARNING: {flag} has no effect with --engine {engine}; it is for --engine {those}", file=sys.stderr)


def with_engine_flags(settings: Settings, words: Sequence[str]) -> Settings:
    """Return the settings with the words behind ``--``, flags of vllm serve. Raises ConfigError for other engines."""
    if words:
        import shlex

        settings = replace(settings, vllm_args=" ".join(filter(None, (settings.vllm_args, shlex.join(words)))))
    if settings.vllm_args and settings.engine not in ("vllm", "vllm-group"):
        raise ConfigError(
            "flags of vllm serve (behind --, or in MEDUSA_VLLM_ARGS) need --engine vllm, "
            f"found --engine {settings.engine}"
        )
    return settings


def resolve_settings(environ: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Return the settings for the platform around us. Our variables override its own ones, except PORT.

    Raises ConfigError, also when there is nothing to serve.
    """
    name = resolve(from_env(environ, **flags).platform, environ)
    meant = load(name).variables(environ)
    known = {variable: value for variable, value in meant.items() if variable == "PORT" or not environ.get(variable)}
    settings = replace(from_env({**environ, **known}, **flags), platform=name)
    if is_remote(settings.engine) and settings.served_model_name is None:
        settings = replace(settings, served_model_name=settings.model)  # a model's name in the cluster, no location
    if settings.model is None and settings.handler is None and not _hosts_models(name, environ):
        where = ", or on SageMaker a checkpoint in /opt/ml/model" if name == "sagemaker" else ""
        raise ConfigError(
            f"there is nothing to serve: expected --model (a checkpoint), --handler (user code), or both{where}"
        )
    return settings


def _hosts_models(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether models are loaded by request, so that none has to be given now."""
    if name != "sagemaker":
        return False
    from ..platforms import sagemaker

    return sagemaker.is_multi_model(environ)


def _run_function_process(listener: socket.socket, handle: InstanceHandle, settings: Settings) -> int:
    with handle.timeline.stage("import"):
        from medusa_handler.server.function_process import serve

    return serve(listener, handle, settings, load(settings.platform).platform(settings, os.environ))


class LoggedStart:
    """A start as lines of the log, for logs that a program reads."""

    def __init__(self) -> None:
        import logging

        self._logger = logging.getLogger(__name__)
        self._url = ""

    def bound(self, url: str) -> None:
        self._url = url
        self._logger.info("listening on %s", url)

    def progress(self, progress: Progress) -> None: ...

    def ready(self, stages: list[Stage]) -> None:
        from medusa_runtime.timeline import window

        from ..report.gantt import MS, tracks

        start, end = window(stages)
        longest = sorted(tracks(stages), key=lambda track: track.busy_ns, reverse=True)[:_LONGEST_STAGES]
        shown = ", ".join(f"{track.process} {track.name} {track.busy_ns / MS:.0f} ms" for track in longest)
        self._logger.info("ready on %s after %.0f ms; the longest stages: %s", self._url, (end - start) / MS, shown)

    def first_token(self, stages: list[Stage]) -> None: ...


class Console:
    """The output of a start: the address, the fetch's progress (one moving line on a terminal), and the chart."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        self._stream: TextIO | None = stream
        self._moving = stream.isatty()
        self._width = width
        self._url = ""
        self._progress = ProgressLine(self._write, moving=self._moving)

    def bound(self, url: str) -> None:
        self._url = url
        self._write(f"listening on {url}\n")

    def progress(self, progress: Progress) -> None:
        self._progress.show(progress)

    def ready(self, stages: list[Stage]) -> None:
        self._progress.end()
        self._chart(stages)
        self._write(f"ready on {self._url}\n")

    def first_token(self, stages: list[Stage]) -> None:
        from medusa_runtime.timeline import moment, ready_at, window

        from ..report.gantt import MS

        self._progress.end()
        token, (start, end) = moment(stages, "first_token"), window(stages)
        if token is not None and token <= end and ready_at(stages) is not None:
            self._write(f"first token {(token - start) / MS:.0f} ms after the start\n")

    def _chart(self, stages: list[Stage]) -> None:
        import shutil

        from ..report.gantt import render_text

        self._write("\n" + render_text(stages, self._width or shutil.get_terminal_size((100, 0)).columns) + "\n\n")

    def _write(self, text: str) -> None:
        """Write without raising, because the instance must go on when the reader of its output has gone."""
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None
