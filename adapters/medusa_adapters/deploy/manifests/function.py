"""The description of a function to deploy, on any platform."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from medusa_runtime.config import Settings, from_env
from medusa_runtime.errors import ConfigError
from medusa_runtime.registry import NO_ENGINE, offered_engines
from medusa_runtime.storage.base import find_store, redacted, scheme_of

from ...cli.flags import misspelt
from ...platforms.base import load
from . import values
from .flags import add_list
from .measured import MeasuredStart, read_measured_start

_MOST_CONCURRENCY = 1000  # Knative's own limit for containerConcurrency
_HOLD_FACTOR = 10  # a request is held for ten measured starts
_LEAST_HOLD_S = 30
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|ACCESS_KEY|API_KEY)$")


@dataclass(frozen=True)
class Function:
    """A function to deploy: its image, its load, and the environment variables that configure it."""

    name: str
    image: str
    concurrency: int
    timeout_s: int
    env: Mapping[str, str] = field(default_factory=dict)
    measured: MeasuredStart | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all platforms share."""
    parser.add_argument("name", metavar="NAME", help="the function's name")
    parser.add_argument("--image", help="its image")
    parser.add_argument("--model", help="checkpoint, as `medusa serve --model` takes it (MEDUSA_MODEL)")
    parser.add_argument("--handler", help="user code (MEDUSA_HANDLER); the image's own setting if not given")
    parser.add_argument("--engine", choices=(*offered_engines(), NO_ENGINE), help="MEDUSA_ENGINE")
    add_list(parser, "--env", "NAME=VALUE", "environment")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=Settings().max_concurrency,
        help="requests that one instance serves at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE|URL",
        help="what GET /timeline of a started instance answers; scaling and timeouts follow from its measured start",
    )


def add_timeout(parser: argparse.ArgumentParser, default_s: int = 300, bounds: str = "") -> None:
    """Add ``--timeout-s``; ``bounds`` says in its help what it may be."""
    limit = f"{bounds}; default" if bounds else "default"
    parser.add_argument(
        "--timeout", type=int, default=default_s, help=f"seconds a request may take ({limit}: %(default)s)"
    )


def parse_function(arguments: argparse.Namespace, *, platform: str, timeout_s: int) -> Function:
    """Return the checked function. Raises ConfigError, which names the flag that cannot be used."""
    values.name(arguments.name)
    # SageMaker's own --max-concurrency counts instances.
    flag = "--concurrency" if platform == "sagemaker" else "--max-concurrency"
    values.check_range(arguments.concurrency, 1, _MOST_CONCURRENCY, flag, "requests")
    measured = read_measured_start(arguments.timeline) if arguments.timeline else None
    if measured is not None and measured.answer_s > timeout_s:
        raise ConfigError(
            f"--timeout-s={timeout_s}: the measured start takes {measured.answer_s:.1f} s to its first answer, no "
            "first request could be answered; raise the timeout or make the start faster"
        )
    env = {"MEDUSA_PLATFORM": platform}
    env |= _given(arguments)
    env |= {"MEDUSA_HOLD": str(hold_s(measured, timeout_s))}
    if platform != "openfaas":  # which sets it with max_inflight
        env |= {"MEDUSA_MAX_CONCURRENCY": str(arguments.concurrency)}
    env |= values.variables(arguments.env)
    _check_environment(env, platform)
    return Function(
        arguments.name, values.image(arguments.image), arguments.concurrency, timeout_s, env=env, measured=measured
    )


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables of the flags that were given. Raises ConfigError for an empty text."""
    for flag, value, expected in (
        ("--model", arguments.model, "a checkpoint's folder or URL"),
        ("--handler", arguments.handler, "file.py:name or module:name"),
    ):
        if value is not None and not value.strip():
            raise ConfigError(f"{flag}: expected {expected}, found an empty text; without the flag, the image decides")
    given = {"MEDUSA_MODEL": arguments.model, "MEDUSA_HANDLER": arguments.handler, "MEDUSA_ENGINE": arguments.engine}
    return {variable: value for variable, value in given.items() if value is not None}


def _check_environment(env: Mapping[str, str], platform: str) -> None:
    """Raise ConfigError for a variable with which an instance would not start."""
    adapter = load(platform)
    from_env({**adapter.variables(env), **env})
    for variable in ("MEDUSA_MODEL", "MEDUSA_STATE"):
        url = env.get(variable, "")
        if url.partition("://")[2] != redacted(url).partition("://")[2]:
            raise ConfigError(
                f"{variable}={redacted(url)!r} came with a user, password or query, which everybody who reads what is "
                f"deployed would see: expected a URL without them, and credentials that the instance finds by itself"
            )
    if model := env.get("MEDUSA_MODEL"):
        _check_model(model)
    for variable, meant in misspelt(env):
        print(f"medusa: {variable} is no setting and has no effect; did you mean {meant}?", file=sys.stderr)
    if readable := [name for name in env if _SECRET.search(name)]:
        print(f"medusa: {', '.join(readable)}: everybody who reads what is deployed sees the value", file=sys.stderr)


def _check_model(model: str) -> None:
    """Say what an instance may miss, though it may be there: a folder in the image, or a package that reads the URL."""
    if scheme_of(model) in ("", "file"):
        print(
            f"medusa: MEDUSA_MODEL={model} is a path in the container, into which this command copies nothing: "
            "expected the model in the image or in a volume there, or else a URL",
            file=sys.stderr,
        )
        return
    try:
        find_store(model)
    except ConfigError as error:
        print(f"medusa: {error}", file=sys.stderr)


def hold_s(measured: MeasuredStart | None, timeout_s: int) -> int:
    """Return how long a request waits for the model before it gets 503 and Retry-After.

    It is less than ``timeout_s``, after which the platform itself would end the request.
    """
    most = max(1, timeout_s - 5)
    if measured is None:
        return most
    return min(most, max(_LEAST_HOLD_S, round(_HOLD_FACTOR * measured.answer_s)))
