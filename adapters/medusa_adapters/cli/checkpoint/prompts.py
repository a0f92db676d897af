"""Records prompts for a state bundle: asks an instance each of them, which writes down what it computes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medusa_runtime.config import Settings, to_env
from medusa_runtime.device.choice import choose
from medusa_runtime.errors import ConfigError
from medusa_runtime.state.kinds import PROMPT_KV, PROMPTS, RECORDING_VARIABLE
from medusa_runtime.state.prompts import RecordedPrompts

from ...bench.served_instance import HttpResponse, ServedInstance, serve_command
from ..batch.lines import BadLineError, BatchRequest, parse_request
from ..batch.source import Source
from ..progress import note

_MESSAGE = 500  # characters of a message that is shown
_ANSWER_S = 24 * 3600.0  # one prompt may take this long


def read_prompts(place: str, settings: Settings) -> list[BatchRequest]:
    """Read a file of requests in the form of `medusa batch`. Raises ConfigError, StorageError and their kin."""
    if settings.engine != "torch":
        raise ConfigError(f"--prompts is for --engine torch, found --engine {settings.engine}")
    if choose(settings.device, os.environ) == "cuda":
        raise ConfigError("--prompts is for CPUs: a GPU computes prompts faster than they come; expected --device cpu")
    if settings.prefix_cache_mb == 0:
        raise ConfigError("--prefix-cache-mb=0: expected more, or none, since starts use --prompts by prefix caching")
    source = Source(place, settings.max_body_bytes, lambda: False)
    try:
        requests = [parse_request(number, line) for number, line in source.lines()]
    except BadLineError as error:
        raise ConfigError(f"--prompts={place}: {error}") from None
    finally:
        source.close()
    if not requests:
        raise ConfigError(f"--prompts={place}: expected requests, one a line, found none")
    return requests


def record(requests: Sequence[BatchRequest], settings: Settings, bundle: Path, folder: Path) -> tuple[bytes, Path]:
    """Ask all requests of an instance, and return the two artifacts. The second one is a file in ``folder``.

    ``bundle`` is that of the instance, which only this command may ask: what it is asked becomes a part of the bundle.
    Raises ConfigError if a request is refused, or none has a block of tokens.
    """
    token = os.urandom(16).hex()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEDUSA_")}
    settings = replace(
        settings, device="cpu", handler=None, state=str(bundle.resolve()), platform="local", host="127.0.0.1", port=0,
        token=token, api_key_file=None, cors_origins=None, node_socket="none", snapshots="none", log_level="warning",
        timeout_s=0.0,
    )  # fmt: skip
    environ |= {**to_env(settings), RECORDING_VARIABLE: str(folder)}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    with ServedInstance(serve_command(), environ, inherit=False) as instance:
        instance.wait_ready()
        for count, request in enumerate(requests, 1):
            with instance.explained_failures():
                answer = instance.exchange("POST", request.url, request.body, headers, timeout_s=_ANSWER_S)
            if answer.status != 200:
                raise ConfigError(f"--prompts, line {request.number}: {request.url} answers {_error(answer)}")
            recorded = _recorded(folder)
            tokens = 0 if recorded is None else len(RecordedPrompts.from_bytes(recorded).tokens)
            note(f"{count} of {len(requests)} prompts: {tokens:,} tokens are recorded")
    if recorded is None:
        raise ConfigError("--prompts: expected prompts of 16 tokens or more, of which starts skip whole blocks of 16")
    return recorded, folder / PROMPT_KV.name


def _recorded(folder: Path) -> bytes | None:
    file = folder / PROMPTS.name
    return file.read_bytes() if file.exists() else None


def _error(answer: HttpResponse) -> str:
    """Return the status of an answer and its error's message."""
    try:
        message = answer.json["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = answer.body.decode(errors="replace")
    return f"{answer.status}: {str(message)[:_MESSAGE]}"


__all__ = ["read_prompts", "record"]
