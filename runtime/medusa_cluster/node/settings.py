"""The settings of a node server, which ``medusa cluster start`` makes from its flags."""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from medusa_runtime.errors import ConfigError
from medusa_runtime.storage.peer_access import PeerAccess

DATA_PORT = 8114
RAY_PORT = 6379
RAY_PORTS = 40  # how many ports Ray's processes use, from the first on; see ray/processes.py
ACTOR_SOCKET = "actor.sock"

# Ray makes Unix sockets in `<folder>/ray/t/session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store.<n>`. The
# path of a socket may have 107 bytes at most.
_LONGEST_FOLDER = 34
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class TlsFiles(NamedTuple):
    """PEM files: this node's certificate and key, and the authority that signed all nodes' certificates."""

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def below(cls, folder: Path) -> TlsFiles:
        """Return where a node has the files that it makes from the cluster's token, in its own folder."""
        return cls(*(folder / "tls" / name for name in ("node.pem", "node.key", "ca.pem")))

    def for_access(self) -> tuple[str, str, str]:
        """Return the paths as ``PeerAccess.of`` takes them: authority, certificate, key."""
        return str(self.authority), str(self.certificate), str(self.key)


@dataclass(frozen=True, slots=True)
class NodeServerSettings:
    """The settings of a node server.

    ``head_url`` is the head's node server, or None on the head itself. ``ray_port`` is the first of ``RAY_PORTS`` ports
    for Ray's processes; on the head it is the one that other nodes connect to. ``prewarm`` and ``memory_budget`` are
    options of ``medusa node``. ``leaf`` is the switch that the node hangs on, ``gpus`` the names of its GPUs, with
    ``gpu_bytes_per_s`` from the host's memory to each (None: as the driver says), and ``device_kind`` the operator's
    word for what it computes on.
    """

    name: str
    folder: Path
    host: str
    token_file: Path
    head_url: str | None = None
    data_port: int = DATA_PORT
    ray_port: int = RAY_PORT
    link_bytes_per_s: float = 1.25e9
    memory_budget: str | None = None
    prewarm: str | None = "torch=1"
    autoscaling_config: Path | None = None  # the file of Ray's autoscaler, if the head is to run it
    least_nodes: int | None = None  # how many nodes an autoscaler has to leave; None: there is no autoscaler
    leaf: str = ""
    gpus: tuple[str, ...] = ()
    gpu_bytes_per_s: float | None = None
    device_kind: str = ""
    tls: TlsFiles | None = None
    makes_certificates: bool = False  # from the token, at its start, as the files in ``tls``
    log_level: str = "info"
    log_format: str = "text"

    @property
    def log_environment(self) -> dict[str, str]:
        """The variables by which the processes of this node log as the node server does."""
        return {"MEDUSA_LOG_LEVEL": self.log_level, "MEDUSA_LOG_FORMAT": self.log_format}

    @property
    def is_head(self) -> bool:
        return self.head_url is None

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    @property
    def url_host(self) -> str:
        """The host as URLs have it: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def address(self) -> str:
        """The ``host:port`` at which other nodes reach this node server."""
        return f"{self.url_host}:{self.data_port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}"

    def access(self) -> PeerAccess:
        """Return the token and certificates for calls between nodes. Raises ConfigError if one is bad."""
        return PeerAccess.of(str(self.token_file), *(() if self.tls is None else self.tls.for_access()))

    @property
    def control_socket(self) -> Path:
        return self.folder / "control.sock"

    @property
    def controller_socket(self) -> Path:
        return self.folder / "controller.sock"

    @property
    def actor_socket(self) -> Path:
        return self.folder / ACTOR_SOCKET

    @property
    def agent_socket(self) -> Path:
        return self.folder / "node.sock"

    @property
    def ray_folder(self) -> Path:
        """The folder of Ray's files. All users may read it, so it lies in a folder that only this user can enter."""
        return self.folder / "ray" / "t"

    @property
    def log_folder(self) -> Path:
        return self.folder / "logs"


def check_name(name: str) -> str:
    """Return a node's name. Raises ConfigError if it does not fit into a label of Ray."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name: expected 1 to 63 letters, digits and . _ -, found {name!r}")
    return name


def check_device_kind(kind: str) -> str:
    """Return a node's kind of device. Raises ConfigError if it is longer or stranger than a name."""
    if kind and not _NAME.fullmatch(kind):
        raise ConfigError(f"--device-kind: expected 1 to 63 letters, digits and . _ -, found {kind!r}")
    return kind


def check_folder(folder: Path) -> Path:
    """Make the node's folder, for this user alone, and return it. Raises ConfigError if it cannot be used."""
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise ConfigError(
            f"--dir: expected a path of at most {_LONGEST_FOLDER} bytes, because sockets lie below it, found {folder}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--dir: {folder} cannot be used: {error.strerror}") from None
    check_own(folder)
    return folder


def check_own(folder: Path) -> None:
    """Raise ConfigError unless a folder is this user's. Any user may have made the default one, which is in /tmp."""
    try:
        found = os.stat(folder, follow_symlinks=folder != default_folder())
    except OSError as error:
        raise ConfigError(f"--dir: {folder} cannot be used: {error.strerror}") from None
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigError(
            f"--dir: expected a folder of our own that nobody else can write, found {folder} of user {found.st_uid} "
            f"with mode {stat.S_IMODE(found.st_mode):o}"
        )


def default_folder() -> Path:
    return Path("/run/medusa/cluster") if os.getuid() == 0 else Path(f"/tmp/medusa-cluster-{os.getuid()}")


def make_token(path: Path) -> None:
    """Write a new token to a file that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def write_private(path: Path, content: bytes) -> None:
    """Replace a file at once, readable by this user alone: who reads it meanwhile finds the old or the new one."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)
    part.rename(path)
