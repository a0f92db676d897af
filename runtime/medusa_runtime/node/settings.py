"""The settings of `medusa node`. Each has a flag and an environment variable, in which commas separate a list."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..config import (
    LOG_FORMATS,
    LOG_LEVELS,
    NODE_SOCKET,
    TORCH_IMPORTS,
    OneOf,
    Option,
    positive,
    read_options,
    seconds,
    trust_keys,
    trust_prefixes,
)
from ..container_limits import memory_available_bytes, memory_limit_bytes
from ..errors import ConfigError
from ..registry import engine_names, is_remote
from ..storage.canonical_urls import canonical_url

if TYPE_CHECKING:
    from ..storage.peer_access import PeerAccess

_MOST_WARM = 64
# As much as arrives of a model while the cores are busy with its start. Pages of the rest are allocated chunk by chunk.
_READY_BYTES = 64 << 20
_BUDGET_SHARE = 0.8  # of this container's memory; the rest is for engine processes
LONGEST_PATH_BYTES = 107  # of a Unix socket, unix(7)
_MOST_UID_DIGITS = 10
_COUNT = re.compile(r"[0-9]{1,9}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?")


@dataclass(frozen=True, slots=True)
class ListenSocket:
    """A socket to listen on. With ``prefixes``, it belongs to a tenant, which may have only the models below them."""

    path: str
    prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """What one account may have at a time. An account is a user, or all users of a tenant's socket.

    The agent's own user is not limited. ``memory_bytes`` is for models in use and for engines' KV caches; 0 means half
    of the memory budget. For ``pause_s`` after it has taken a warm engine, an account leaves the last warm one of that
    kind to others, if others have asked for any.
    """

    connections: int = 1024
    fetches: int = 16
    models: int = 64
    engines: int = 32
    pause_s: float = 10.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AllowRule:
    """A rule that opens the models below a prefix to these users or, with None, to all users."""

    prefix: str
    users: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The settings of ``medusa node``. ``memory_budget_bytes`` 0 stands for a share of this container's memory."""

    socket: tuple[ListenSocket, ...] = (ListenSocket(NODE_SOCKET),)
    memory_budget_bytes: int = 0
    ready_memory_bytes: int | None = None  # None: _READY_BYTES in a cluster, or else 0
    prewarm: Mapping[str, int] = field(default_factory=dict)  # engine kind → number of idle processes
    allow: tuple[AllowRule, ...] = ()  # empty: models in stores are only for the agent's own user
    per_caller: CallerLimits = CallerLimits()
    quota: Mapping[str, int] = field(default_factory=dict)  # prefix → bytes
    pin: tuple[str, ...] = ()
    look_every_s: float = 60.0  # the time between checks whether a store's objects were replaced; 0: never
    gpu_context: bool = False
    torch_import: str = "auto"
    snapshots: str = "auto"
    trust_state: str | None = None  # as in config.Settings, for the code that idle engines run
    trust_key: str | None = None
    connections: int | None = None
    cluster: str | None = None  # the control socket of the node server, which knows the peers that have a model
    cluster_token: str | None = None  # the paths of the token and of the certificates for mutual TLS
    cluster_ca: str | None = None
    cluster_cert: str | None = None
    cluster_key: str | None = None
    log_level: str = "info"
    log_format: str = "text"
    metrics_port: int | None = None

    @property
    def path(self) -> str:
        """The path of the first socket, beside which the agent keeps its list of regions."""
        return self.socket[0].path

    @property
    def ready_bytes(self) -> int:
        """How much memory is allocated for the next model while nothing is fetched."""
        if self.ready_memory_bytes is not None:
            return self.ready_memory_bytes
        return 0 if self.cluster is None else _READY_BYTES

    def peer_access(self) -> PeerAccess | None:
        """Read the credentials for other nodes of the cluster; None without ``cluster``. Raises ConfigError."""
        if self.cluster is None:
            return None
        if self.cluster_token is None:
            raise ConfigError(f"--cluster {self.cluster}: expected the cluster's token, too (--cluster-token FILE)")
        from ..storage.framing import import_xxh3_64
        from ..storage.peer_access import PeerAccess

        import_xxh3_64()  # so that a missing package is reported at start
        return PeerAccess.of(self.cluster_token, self.cluster_ca, self.cluster_cert, self.cluster_key)

    def budget_bytes(self) -> int:
        """Return the memory that all regions may take together."""
        if self.memory_budget_bytes:
            return self.memory_budget_bytes
        limit = memory_limit_bytes()
        free = memory_available_bytes()
        return int(min(limit or free, free) * _BUDGET_SHARE)


def size_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = 0.0
    if match is not None:
        size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    if not 1 <= size < 2**63:
        raise ValueError("a size above 0 such as 500MB, 16GB or 16Gi")
    return int(size)


def _size_or_zero(text: str) -> int:
    """Parse a size, or 0."""
    return 0 if text.strip() == "0" else size_bytes(text)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_rule_prefix(text: str) -> bool:
    """Return whether this is a valid prefix for a rule: ``*``, a folder, or a URL with a host or bucket."""
    return text == "*" or canonical_url(text) is not None


def _prewarm(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in _parts(text):
        kind, _, count = part.partition("=")
        kinds = [name for name in engine_names() if not is_remote(name)]
        if kind not in kinds or not _COUNT.fullmatch(count) or int(count) > _MOST_WARM:
            known = ", ".join(kinds)
            raise ValueError(f"engine=count such as torch=2,vllm=1 with engines {known}, at most 64 of each")
        found[kind] = int(count)
    return found


def _allow(text: str) -> tuple[AllowRule, ...]:
    found: list[AllowRule] = []
    for part in _parts(text):
        prefix, sign, users = part.rpartition("=")
        if not sign or not re.fullmatch(r"[0-9]+(\+[0-9]+)*", users):
            found.append(AllowRule(part))
        elif max(map(len, users.split("+"))) > _MOST_UID_DIGITS:
            raise ValueError(f"users with numbers of at most {_MOST_UID_DIGITS} digits")
        else:
            found.append(AllowRule(prefix, frozenset(map(int, users.split("+")))))
    if not found or not all(_is_rule_prefix(allowed.prefix) for allowed in found):
        raise ValueError("URL prefixes such as s3://bucket/team/, each with =uid or =uid+uid for these users alone")
    return tuple(found)


def _quota(text: str) -> dict[str, int]:
    found = {}
    for part in _parts(text):
        prefix, sign, size = part.rpartition("=")
        if not sign or not _is_rule_prefix(prefix):
            raise ValueError("prefix=size such as s3://bucket/team/=20GB")
        found[prefix] = size_bytes(size)
    return found


def _pins(text: str) -> tuple[str, ...]:
    return tuple(_parts(text))


def _sockets(text: str) -> tuple[ListenSocket, ...]:
    found = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        path, sign, prefixes = part.partition("=")
        listener = ListenSocket(path, tuple(_parts(prefixes)))
        lacks_prefixes = sign and not listener.prefixes
        if not path.startswith("/") or lacks_prefixes or not all(map(_is_rule_prefix, listener.prefixes)):
            raise ValueError(
                "an absolute path, or PATH=PREFIX[,PREFIX] such as /run/a.sock=s3://bucket/a/ for a tenant"
            )
        found.append(listener)
    if not found or len({listener.path for listener in found}) < len(found):
        raise ValueError("absolute paths, each of them once")
    return tuple(found)


def _per_caller(text: str) -> CallerLimits:
    limits = CallerLimits()
    form = "connections=N,fetches=N,models=N,engines=N,pause=SECONDS,memory=SIZE, any of them"
    for part in _parts(text):
        name, _, value = part.partition("=")
        if name == "memory":
            limits = replace(limits, memory_bytes=size_bytes(value))
        elif name == "pause":
            limits = replace(limits, pause_s=seconds(value))
        elif name in ("connections", "fetches", "models", "engines") and _COUNT.fullmatch(value):
            limits = replace(limits, **{name: int(value)})
        else:
            raise ValueError(form)
    return limits


def _path(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError("an absolute path")
    return text


def _metrics_port(text: str) -> int:
    if not _COUNT.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise ValueError("a port from 1 to 65535")
    return int(text)


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


NODE_OPTIONS = (
    Option(
        "socket",
        _sockets,
        f"PATH[=PREFIX,PREFIX]: where to listen, and for which models if it is a tenant's own; default {NODE_SOCKET}",
        "MEDUSA_NODE_SOCKET",
    ),
    Option(
        "memory_budget_bytes",
        size_bytes,
        "memory for all regions, e.g. 16GB; default: 80 % of this container's",
        "MEDUSA_NODE_MEMORY_BUDGET",
    ),
    Option(
        "ready_memory_bytes",
        _size_or_zero,
        "memory made ready for the next model while nothing is fetched, e.g. 256MB, or 0; default: 64Mi in a cluster",
        "MEDUSA_NODE_READY_MEMORY",
    ),
    Option("prewarm", _prewarm, "idle engine processes to keep, e.g. torch=2", "MEDUSA_NODE_PREWARM"),
    Option("allow", _allow, "PREFIX[=UID+UID]: models that may be had, and by whom", "MEDUSA_NODE_ALLOW"),
    Option(
        "per_caller",
        _per_caller,
        "connections=N,fetches=N,models=N,engines=N,memory=SIZE: what one user, or tenant's socket, may have at a "
        "time; pause=SECONDS: how long one that takes a warm engine leaves the last one to others",
        "MEDUSA_NODE_PER_CALLER",
    ),
    Option("quota", _quota, "PREFIX=SIZE: the memory that models below it may take", "MEDUSA_NODE_QUOTA"),
    Option("pin", _pins, "a model to fetch at once and never to evict", "MEDUSA_NODE_PIN"),
    Option(
        "look_every_s",
        seconds,
        "seconds between looks whether models in a store have changed; 0: never",
        "MEDUSA_NODE_LOOK_EVERY",
    ),
    Option(
        "gpu_context", _yes_or_no, "yes: idle engines hold a GPU's context, half a GB each", "MEDUSA_NODE_GPU_CONTEXT"
    ),
    Option(
        "torch_import",
        OneOf(*TORCH_IMPORTS),
        "idle engines' torch: plain, or lean where that was tested (auto and lean)",
    ),
    Option("snapshots", str, "as in `medusa serve`; used if one kind of engine is kept"),
    Option(
        "trust_state",
        trust_prefixes,
        "PREFIX[,PREFIX]: folders and URLs whose state bundles may bring code that idle engines run; default: none",
    ),
    Option(
        "trust_key",
        trust_keys,
        "KEY[,KEY]: ed25519 public keys (or PEM files); code in bundles signed with one of them is run, too",
    ),
    Option("connections", positive, "connections to the store of one fetch"),
    Option(
        "cluster",
        _path,
        "the control socket of this node's server in a cluster: models come from other nodes where they are there",
        "MEDUSA_NODE_CLUSTER",
    ),
    Option("cluster_token", _path, "file with the cluster's token, mode 0600", "MEDUSA_CLUSTER_TOKEN_FILE"),
    Option("cluster_ca", _path, "CA of the nodes' certificates, for mutual TLS", "MEDUSA_CLUSTER_CA_FILE"),
    Option("cluster_cert", _path, "this node's certificate", "MEDUSA_CLUSTER_CERT_FILE"),
    Option("cluster_key", _path, "the key of this node's certificate", "MEDUSA_CLUSTER_KEY_FILE"),
    Option("log_level", OneOf(*LOG_LEVELS), "how much to log"),
    Option("log_format", OneOf(*LOG_FORMATS), "json: each line of the log is an object"),
    Option("metrics_port", _metrics_port, "a port on which to answer GET /metrics", "MEDUSA_NODE_METRICS_PORT"),
)
# Flags that may be given several times, each with the separator that joins its values, as in the variables.
REPEATED = {"socket": ";", "allow": ",", "quota": ",", "pin": ","}


def node_settings(environ: Mapping[str, str], flags: Mapping[str, str | None]) -> NodeSettings:
    """Read the settings from flags and, where a flag is None, from the environment. Raises ConfigError."""
    settings = NodeSettings(**read_options(NODE_OPTIONS, environ, flags))
    for listener in settings.socket:
        if len(os.fsencode(listener.path)) > LONGEST_PATH_BYTES:
            raise ConfigError(
                f"--socket={listener.path!r}: expected at most {LONGEST_PATH_BYTES} bytes, as a socket's path may have"
            )
    return settings
