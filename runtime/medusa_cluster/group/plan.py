"""The plan of a group for one of its workers: a JSON file that only its user can read, because it has the token."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ConfigError
from medusa_runtime.storage.peer_access import PeerAccess

from .wire.emulated_link import EmulatedLink
from .wire.tunnel import is_store_place

logger = logging.getLogger(__name__)

THEN = ("down", "up", "stay")
MODES = ("pipeline", "live", "disaggregated")
SCHEDULES = ("zigzag", "best-effort")


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One worker's view of its group.

    group, token: the group's id and its secret, by which workers recognize each other; the same for all of them.
    rank, size: this worker's number, and how many there are. Rank 0 is the leader, which has the scheduler and the
        first layers, and fetches all others.
    leader: ``HOST:PORT`` where the leader listens. Where workers cannot connect to each other, the URL or the absolute
        path of a folder of this group alone, to which all of them can write.
    bind: the address of the interface on which this worker listens and is reached by the others.
    full: whether this worker has memory for all layers, and fetches the others in the background.
    then: what happens once the leader has all layers. ``down``: it goes on alone, and the others end. ``up``: the
        others become instances. ``stay``: nothing. The leader reads its file again and again, so this may change.
    keep: how many workers become instances with ``up``, including the leader. 0: all that have the memory.
    form_s: how long the leader waits for the others before it goes on alone, and a worker for its leader.
    mode: ``pipeline``: each worker has a range of layers. ``live``: rank 0 is an instance with all layers, and rank 1 a
        new one, which helps it while loading them. ``disaggregated``: rank 0 decodes, and the others prefill for it.
        One that helps rank 0 becomes an instance when its own file says ``up``, or when it loses rank 0.
    listen: ``HOST:PORT`` where one of those others listens once it is an instance, for others that prefill for it.
    relieves: whether one that prefills for rank 0 runs, while it loads, first layers of what others prefill for rank 0.
    schedule: how a new instance helps: ``zigzag``, or the naive ``best-effort`` for comparison.
    silent_s: a worker without a sign of life for so many seconds counts as dead.
    exit: whether a worker's process ends when it is released; otherwise it waits for SIGTERM.
    link_bytes_per_s: an emulated network, for measurements on one machine.
    ca_file, cert_file, key_file: the certificates with which workers encrypt their connections; all three, or none.
    """

    group: str
    token: str
    rank: int
    size: int
    leader: str
    listen: str | None = None
    bind: str = "127.0.0.1"
    full: bool = True
    then: str = "down"
    keep: int = 0
    form_s: float = 20.0
    silent_s: float = 3.0
    mode: str = "pipeline"
    relieves: bool = False
    schedule: str = "zigzag"
    exit: bool = False
    link_bytes_per_s: float | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @classmethod
    def read(cls, path: str) -> GroupPlan:
        """Read and check the file. Raises ConfigError, which says what is wrong with it."""
        try:
            found = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"--group: {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"--group: {path}: expected JSON, found: {error}") from None
        return cls.parse(found, path)

    @classmethod
    def parse(cls, found: Any, where: str = "a group") -> GroupPlan:
        """Make a plan of an object from JSON. Raises ConfigError, which names the wrong field and ``where`` it is."""
        if not isinstance(found, dict):
            raise ConfigError(f"{where}: expected an object with the fields of a group")
        kinds = {one.name: str(one.type) for one in fields(cls)}
        unknown = sorted(set(found) - set(kinds))
        missing = [name for name in ("group", "token", "rank", "size", "leader") if name not in found]
        if unknown or missing:
            raise ConfigError(f"{where}: expected the fields of a group; missing: {missing}, unknown: {unknown}")
        for name, value in found.items():
            accepted = _ACCEPTED[kinds[name]]
            if type(value) not in accepted:
                raise ConfigError(f"{where}: {name}: expected {kinds[name]}, found {value!r}")
        plan = cls(**found)
        _check(plan, where)
        return plan

    @property
    def access(self) -> PeerAccess:
        """The group's token, and the certificates of the node, for connections between workers."""
        return PeerAccess(self.token, self.ca_file, self.cert_file, self.key_file)

    @property
    def queue(self) -> str:
        """How an instance that helps another one chooses its work: ``whole`` prompts, or one of ``SCHEDULES``."""
        return "whole" if self.mode == "disaggregated" else self.schedule

    @property
    def number(self) -> int:
        """The group's id as a number, which is in each message."""
        return int.from_bytes(blake2b(self.group.encode(), digest_size=8).digest(), "little")

    def emulated_link(self) -> EmulatedLink | None:
        """Return a new link for the connections of one process, or None for the machine's own network."""
        return EmulatedLink(self.link_bytes_per_s) if self.link_bytes_per_s else None

    @property
    def is_through_store(self) -> bool:
        """True if workers reach each other through objects in a store, and not over the network."""
        return is_store_place(self.leader)

    @property
    def leader_place(self) -> str:
        """Where workers connect to their leader: ``HOST:PORT``, or a place in a store."""
        return self.store_place(0) or self.leader

    @property
    def leader_address(self) -> tuple[str, int]:
        """Where the leader listens: a host and a port, or a place in a store and 0."""
        return (self.leader_place, 0) if self.is_through_store else _address(self.leader)

    def store_place(self, rank: int) -> str | None:
        """Return where a worker is reached through the store, or None where connections are possible."""
        return f"{self.leader.rstrip('/')}/{rank}" if self.is_through_store else None

    @property
    def partners_place(self) -> str | None:
        """``HOST:PORT`` where other instances can come to help this one, or None if none can."""
        return self.leader if self.rank == 0 and self.mode != "pipeline" else self.listen

    @property
    def partners_address(self) -> tuple[str, int] | None:
        place = self.partners_place
        return None if place is None else _address(place)


class PlanFile:
    """The group's file, which may change. ``plan`` is its content before the first ``reload``."""

    def __init__(self, path: str, plan: GroupPlan) -> None:
        self._path = path
        self._plan = plan
        self._readable = True

    def reload(self) -> GroupPlan:
        """Read the file and return the plan. If it cannot be read, log that once, and return the last plan."""
        try:
            self._plan = GroupPlan.read(self._path)
            self._readable = True
        except ConfigError as error:
            if self._readable:
                logger.warning("the group's file cannot be read; going on with what it said before: %s", error)
            self._readable = False
        return self._plan


_ACCEPTED: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "str | None": (str, type(None)),
}


def _address(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


def _check(plan: GroupPlan, where: str) -> None:
    files = [path for path in (plan.ca_file, plan.cert_file, plan.key_file) if path]
    checks = (
        (plan.size >= 2, "size", "at least two workers", plan.size),
        (0 <= plan.rank < plan.size, "rank", f"0 to {plan.size - 1}", plan.rank),
        (plan.rank > 0 or plan.full, "full", "true for the leader, which goes on alone when others fail", plan.full),
        (0 <= plan.keep <= plan.size, "keep", f"0 to {plan.size}", plan.keep),
        (plan.then in THEN, "then", "one of " + ", ".join(THEN), plan.then),
        (plan.mode in MODES, "mode", "one of " + ", ".join(MODES), plan.mode),
        (plan.mode != "live" or plan.size == 2, "size", "2, a live pair", plan.size),
        (
            not plan.relieves or (plan.mode == "disaggregated" and plan.rank > 0),
            "relieves",
            "false, but for one that prefills for another one",
            plan.relieves,
        ),
        (plan.schedule in SCHEDULES, "schedule", "one of " + ", ".join(SCHEDULES), plan.schedule),
        (bool(plan.token), "token", "a secret", "an empty one"),
        (len(files) in (0, 3), "ca_file, cert_file, key_file", "all three or none", files),
        (plan.form_s > 0 and plan.silent_s > 0, "form_s, silent_s", "seconds above 0", (plan.form_s, plan.silent_s)),
        (
            plan.is_through_store or plan.leader.rpartition(":")[2].isdecimal(),
            "leader",
            "HOST:PORT, or a folder in a store",
            plan.leader,
        ),
        (not plan.is_through_store or plan.mode == "pipeline", "mode", "pipeline, through a store", plan.mode),
        (
            plan.listen is None
            or (plan.mode == "disaggregated" and plan.rank > 0 and plan.listen.rpartition(":")[2].isdecimal()),
            "listen",
            "HOST:PORT of an instance that prefills for another one",
            plan.listen,
        ),
    )
    for right, name, expected, value in checks:
        if not right:
            raise ConfigError(f"{where}: {name}: expected {expected}, found {value!r}")


__all__ = ["THEN", "GroupPlan", "PlanFile"]
