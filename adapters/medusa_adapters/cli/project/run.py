"""`medusa run`: call a handler once, in this process, or with a model as `medusa serve` does."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from medusa_runtime.config import OPTIONS, Settings, from_env
from medusa_runtime.errors import ConfigError, HandlerError, MedusaError

from ..flags import request_body

if TYPE_CHECKING:
    from ...bench.served_instance import ServedInstance

_ANSWER_S = 3600.0  # a first start may fetch a large model
_UNAVAILABLE = 503
_LAST_WORDS_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("handler", nargs="?", metavar="HANDLER", help="file.py, file.py:name or module:name")
    parser.add_argument("--handler", dest="handler_flag", metavar="HANDLER", help="the same, as serve takes it")
    parser.add_argument(
        "--model", metavar="URL", help="serve the handler with this model until it has answered [MEDUSA_MODEL]"
    )
    engine = next(option for option in OPTIONS if option.field == "engine")
    parser.add_argument(engine.flag, metavar=engine.form, help=f"{engine.help} [{engine.variable}]")
    parser.add_argument(
        "--request",
        default="",
        metavar="BODY",
        help="the request's body; @FILE is a file's content, @- stdin's; default: empty",
    )
    parser.add_argument(
        "--content-type", default="application/json", metavar="TYPE", help="the body's type; default: application/json"
    )


def run(arguments: argparse.Namespace) -> int:
    """Return status 1 when the handler fails or answers with 400 or more."""
    if arguments.handler is not None and arguments.handler_flag is not None:
        raise ConfigError("expected one handler: medusa run HANDLER, or --handler HANDLER")
    handler = arguments.handler or arguments.handler_flag
    settings = from_env(os.environ, handler=handler, model=arguments.model, engine=arguments.engine)
    if settings.handler is None:
        raise ConfigError("expected a handler: medusa run handler.py, or handler.py:name")
    body = request_body(arguments.request)
    if settings.model is not None:
        return _run_served(settings, body, arguments.content_type)
    from medusa_handler.contract import Context, Headers, HttpError, Request
    from medusa_handler.user_code.code import UserCode
    from medusa_handler.user_code.loop import EventLoop
    from medusa_handler.user_code.user_traceback import user_traceback

    code = UserCode(EventLoop())
    request = Request("POST", "/", Headers([("Content-Type", arguments.content_type)]), {}, body, "run")
    try:
        code.load(settings.handler, Context(None, settings))
        status = _show(code.call(request))
        code.close()
    except HttpError as error:
        print(f"status {error.status}: {error.message}", file=sys.stderr)
        return 1
    except MedusaError as error:
        if error.__cause__ is not None:
            _show_frames(user_traceback(error.__cause__, code.folder))
        raise
    except Exception as error:
        _show_frames(user_traceback(error, code.folder))
        raise HandlerError(f"{settings.handler}: answering raised {type(error).__name__}: {error}") from error
    return int(status >= 400)


def _run_served(settings: Settings, body: bytes, content_type: str) -> int:
    """Print the answer of an instance that ends with it; what the instance prints follows on stderr.

    If the instance ends by itself, its output says all, and its status becomes ours.
    """
    from ...bench.served_instance import ServedInstance, serve_command

    assert settings.handler is not None
    assert settings.model is not None
    flags = ("--handler", settings.handler, "--model", settings.model, "--engine", settings.engine)
    with ServedInstance(serve_command(*flags)) as instance:
        try:
            with instance.explained_failures():
                answer = instance.exchange("POST", "/", body, {"Content-Type": content_type}, timeout_s=_ANSWER_S)
        except MedusaError:
            if instance.alive():
                raise
            answer = None
        if answer is None or (answer.status == _UNAVAILABLE and _ended(instance)):
            sys.stderr.write(instance.output())
            return instance.process.returncode or 1
        if answer.status != 200:
            print(f"status {answer.status}", file=sys.stderr)
        _print(answer.body)
        sys.stdout.flush()
        sys.stderr.write(instance.output())
    return int(answer.status >= 400)


def _ended(instance: ServedInstance) -> bool:
    """Wait a few seconds, and return whether the instance has ended.

    An instance that cannot start answers waiting requests with 503, prints the reason, and ends.
    """
    try:
        instance.process.wait(_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _show_frames(text: str) -> None:
    """Print a traceback unless no frame is left in it: the command's last line repeats the error itself."""
    if "\n" in text:
        sys.stderr.write(text + "\n")


def _show(result: Any) -> int:
    """Print what the handler returned, a stream's items one per line, and return its HTTP status."""
    from medusa_handler.contract import Response

    status = 200
    if isinstance(result, Response):
        result, status = result.body, result.status
    elif isinstance(result, tuple) and 2 <= len(result) <= 3 and isinstance(result[1], int):
        result, status = result[0], result[1]
    if status != 200:
        print(f"status {status}", file=sys.stderr)
    for item in result if isinstance(result, Iterator) else [result]:
        _print(item)
    return status


def _print(item: Any) -> None:
    if isinstance(item, bytes | bytearray | memoryview):
        sys.stdout.flush()
        sys.stdout.buffer.write(item)
    elif isinstance(item, str):
        print(item, flush=True)
    elif item is not None:
        from medusa_handler.http.function_response import to_json  # imports Flask

        print(to_json(item), flush=True)
