"""Settings of `medusa node`. Each has a flag and an environment twin; lists are separated by commas there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..config import (
    LOG_LEVELS,
    NODE_SOCKET,
    TORCH_IMPORTS,
    OneOf,
    Option,
    parse_option,
    positive,
    seconds,
    trust_keys,
    trust_prefixes,
)
from ..errors import ConfigError
from ..limits import memory_available_bytes, memory_limit_bytes
from ..registry import engine_names

_MOST_WARM = 64
_BUDGET_SHARE = 0.8  # of what this container may have; the rest is for engine processes
LONGEST_PATH_BYTES = 107  # of a socket, unix(7)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?")


@dataclass(frozen=True, slots=True)
class Allowed:
    """Who may have models below a prefix: these users, or everybody. The prefix ends at a slash or is the whole URL."""

    prefix: str
    users: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Everything ``medusa node`` can be told. ``memory_budget_bytes`` 0: a share of what this container may have."""

    socket: str = NODE_SOCKET
    memory_budget_bytes: int = 0
    prewarm: Mapping[str, int] = field(default_factory=dict)  # engine kind → idle processes
    allow: tuple[Allowed, ...] = ()  # empty: everything, to everybody who can open the socket
    quota: Mapping[str, int] = field(default_factory=dict)  # prefix → bytes
    pin: tuple[str, ...] = ()
    look_every_s: float = 60.0  # at objects in a store, whether they were replaced; 0: never
    gpu_context: bool = False
    torch_import: str = "auto"
    trust_state: str | None = None  # as of config.Settings: from where idle engines run code in bundles
    trust_key: str | None = None
    connections: int | None = None
    log_level: str = "info"

    def budget_bytes(self) -> int:
        """The memory that regions may take together."""
        if self.memory_budget_bytes:
            return self.memory_budget_bytes
        limit = memory_limit_bytes()
        free = memory_available_bytes()
        return int(min(limit or free, free) * _BUDGET_SHARE)


def size_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError("a size above 0 such as 500MB, 16GB or 16Gi")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _prewarm(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in _parts(text):
        kind, _, count = part.partition("=")
        if kind not in engine_names() or not count.isdigit() or int(count) > _MOST_WARM:
            known = ", ".join(engine_names())
            raise ValueError(f"engine=count such as torch=2,vllm=1 with engines {known}, at most 64 of each")
        found[kind] = int(count)
    return found


def _allow(text: str) -> tuple[Allowed, ...]:
    found: list[Allowed] = []
    for part in _parts(text):
        prefix, sign, users = part.rpartition("=")
        if not sign or not re.fullmatch(r"\d+(\+\d+)*", users):
            found.append(Allowed(part))
        else:
            found.append(Allowed(prefix, frozenset(map(int, users.split("+")))))
    if not found or any(not allowed.prefix for allowed in found):
        raise ValueError("URL prefixes such as s3://bucket/team/, each with =uid or =uid+uid for these users alone")
    return tuple(found)


def _quota(text: str) -> dict[str, int]:
    found = {}
    for part in _parts(text):
        prefix, sign, size = part.rpartition("=")
        if not sign or not prefix:
            raise ValueError("prefix=size such as s3://bucket/team/=20GB")
        found[prefix] = size_bytes(size)
    return found


def _pins(text: str) -> tuple[str, ...]:
    return tuple(_parts(text))


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("an absolute path")
    return text


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


NODE_OPTIONS = (
    Option("socket", ("MEDUSA_NODE_SOCKET",), _path, f"where to listen; default {NODE_SOCKET}"),
    Option(
        "memory_budget_bytes",
        ("MEDUSA_NODE_MEMORY_BUDGET",),
        size_bytes,
        "memory for all regions, e.g. 16GB; default: 80 % of this container's",
    ),
    Option("prewarm", ("MEDUSA_NODE_PREWARM",), _prewarm, "idle engine processes to keep, e.g. torch=2"),
    Option("allow", ("MEDUSA_NODE_ALLOW",), _allow, "PREFIX[=UID+UID]: models that may be had, and by whom"),
    Option("quota", ("MEDUSA_NODE_QUOTA",), _quota, "PREFIX=SIZE: the memory that models below it may take"),
    Option("pin", ("MEDUSA_NODE_PIN",), _pins, "a model to fetch at once and never to evict"),
    Option(
        "look_every_s",
        ("MEDUSA_NODE_LOOK_EVERY",),
        seconds,
        "seconds between looks whether models in a store have changed; 0: never",
    ),
    Option(
        "gpu_context",
        ("MEDUSA_NODE_GPU_CONTEXT",),
        _yes_or_no,
        "yes: idle engines hold a GPU's context, half a GB each",
    ),
    Option(
        "torch_import",
        ("MEDUSA_TORCH_IMPORT",),
        OneOf(*TORCH_IMPORTS),
        "idle engines' torch: plain, or lean where that was tested (auto and lean)",
    ),
    Option(
        "trust_state",
        ("MEDUSA_TRUST_STATE",),
        trust_prefixes,
        "PREFIX[,PREFIX]: folders and URLs whose state bundles may bring code that idle engines run; default: none",
    ),
    Option(
        "trust_key",
        ("MEDUSA_TRUST_KEY",),
        trust_keys,
        "KEY[,KEY]: ed25519 public keys (or PEM files); code in bundles signed with one of them is run, too",
    ),
    Option("connections", ("MEDUSA_CONNECTIONS",), positive, "connections to the store of one fetch"),
    Option("log_level", ("MEDUSA_LOG_LEVEL",), OneOf(*LOG_LEVELS), "how much to log"),
)
REPEATED = ("allow", "quota", "pin")  # flags that may be given several times


def node_settings(environ: Mapping[str, str], flags: Mapping[str, str | None]) -> NodeSettings:
    """Settings from the environment, under flags. Raises ConfigError naming source, value and accepted form."""
    settings = NodeSettings()
    for option in NODE_OPTIONS:
        given, source = flags.get(option.field), option.flag
        for variable in option.variables if given is None else ():
            if environ.get(variable):
                given, source = environ[variable], variable
                break
        if given is not None:
            settings = replace(settings, **{option.field: parse_option(option, given, source)})
    if len(settings.socket.encode()) > LONGEST_PATH_BYTES:
        raise ConfigError(
            f"--socket={settings.socket!r}: expected at most {LONGEST_PATH_BYTES} bytes, what a socket's path may have"
        )
    return settings
