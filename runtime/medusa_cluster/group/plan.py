"""What a worker is told of its group: a JSON file that only the user of the worker can read, for it has the token."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ConfigError
from medusa_runtime.storage.peer_access import PeerAccess

logger = logging.getLogger(__name__)

THEN = ("down", "up", "stay")
MODES = ("pipeline", "live", "disaggregated")
SCHEDULES = ("zigzag", "best-effort")


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One worker's view of its group.

    group, token: the same for all workers; the token is what they know each other by.
    rank, size: 0 is the leader, which has the scheduler, holds the first layers, and may come to hold all.
    leader: ``HOST:PORT`` where the leader listens.
    bind: the address of the interface on which this worker listens and is reached by the others.
    full: whether this worker has memory for all layers, and fetches the others in the background.
    then: what happens when the leader has all layers: it goes on alone and the others end (``down``), or become
        instances (``up``), or nothing (``stay``). The leader looks at its file again and again, so this may change.
    keep: how many workers become instances with ``up``, the leader among them; 0: all that have the memory.
    form_s: how long the leader waits for the others before it goes on alone, and a worker for its leader.
    mode: ``pipeline``, workers with a range of layers each; or ``live``, where rank 0 is an instance with all layers,
        and rank 1 a new one that helps it while it loads them; or ``disaggregated``, where rank 0 decodes, and the
        others prefill for it until its file says ``up``.
    schedule: how a new instance helps: by ``zigzag``, or as a naive one would (``best-effort``), to compare.
    silent_s: after so many seconds without a sign of life a worker counts as dead.
    exit: whether a worker's process ends when it is released; otherwise it waits for SIGTERM.
    link_bytes_per_s: an emulated network, for measurements on one machine.
    ca_file, cert_file, key_file: the certificates with which workers encrypt their connections; all three, or none.
    """

    group: str
    token: str
    rank: int
    size: int
    leader: str
    bind: str = "127.0.0.1"
    full: bool = True
    then: str = "down"
    keep: int = 0
    form_s: float = 20.0
    silent_s: float = 3.0
    mode: str = "pipeline"
    schedule: str = "zigzag"
    exit: bool = False
    link_bytes_per_s: float | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @classmethod
    def read(cls, path: str) -> GroupPlan:
        """Read and check the file. ConfigError, which says what is wrong with it."""
        try:
            found = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"--group: {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"--group: {path}: expected JSON, found: {error}") from None
        return cls.parse(found, path)

    @classmethod
    def parse(cls, found: Any, where: str = "a group") -> GroupPlan:
        """Check an object from JSON. ConfigError, which names the field."""
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
        """The token and certificates by which workers know each other; the same as between nodes."""
        return PeerAccess(self.token, self.ca_file, self.cert_file, self.key_file)

    @property
    def queue(self) -> str:
        """How an instance that helps another chooses its work."""
        return "whole" if self.mode == "disaggregated" else self.schedule

    @property
    def number(self) -> int:
        """The group's id as it stands in each message."""
        return int.from_bytes(blake2b(self.group.encode(), digest_size=8).digest(), "little")

    @property
    def leader_place(self) -> tuple[str, int]:
        host, _, port = self.leader.rpartition(":")
        return host.strip("[]"), int(port)


class PlanFile:
    """The group's file, which may change. ``plan`` is what is known of it before the first look."""

    def __init__(self, path: str, plan: GroupPlan) -> None:
        self._path = path
        self._plan = plan
        self._readable = True

    def look(self) -> GroupPlan:
        """Return the plan that could be read last. Log that the file cannot be read once, until it can be again."""
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
        (plan.schedule in SCHEDULES, "schedule", "one of " + ", ".join(SCHEDULES), plan.schedule),
        (bool(plan.token), "token", "a secret", "an empty one"),
        (len(files) in (0, 3), "ca_file, cert_file, key_file", "all three or none", files),
        (plan.form_s > 0 and plan.silent_s > 0, "form_s, silent_s", "seconds above 0", (plan.form_s, plan.silent_s)),
        (plan.leader.rpartition(":")[2].isdecimal(), "leader", "HOST:PORT", plan.leader),
    )
    for right, name, expected, value in checks:
        if not right:
            raise ConfigError(f"{where}: {name}: expected {expected}, found {value!r}")


__all__ = ["THEN", "GroupPlan", "PlanFile"]
