"""An instance that is a worker of a group: its layers, and the file that describes the group to its engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ConfigError

from ..group.plan import GroupPlan
from .settings import TlsFiles, write_private


@dataclass(frozen=True, slots=True)
class GroupWorker:
    """A worker's place in its group.

    ``layers`` is START:STOP, or None for an instance that will have all layers. Such a one may help another instance,
    with the id ``helps``, or have helped it. ``lost``: it prefilled for it, and ended that though nobody told it so.
    """

    plan: GroupPlan
    layers: str | None
    helps: str | None = None
    lost: bool = False

    @classmethod
    def from_json(cls, found: Mapping[str, Any], host: str, tls: TlsFiles | None = None) -> GroupWorker:
        """Read the ``group`` of a ``start`` call, and add this node's address and certificates. Raises ConfigError."""
        if not isinstance(found, Mapping):
            raise ConfigError(f"group: expected an object, found {found!r}")
        values = dict(found)
        layers = values.pop("layers", None)
        if layers is not None and not isinstance(layers, str):
            raise ConfigError(f"group: layers: expected START:STOP, found {layers!r}")
        helps = values.pop("helps", None)
        if helps is not None and not isinstance(helps, str):
            raise ConfigError(f"group: helps: expected the id of an instance, found {helps!r}")
        ours: dict[str, Any] = {"bind": host, "ca_file": None, "cert_file": None, "key_file": None}
        if tls is not None:
            files = {"ca_file": tls.authority, "cert_file": tls.certificate, "key_file": tls.key}
            ours |= {name: str(path.absolute()) for name, path in files.items()}
        return cls(GroupPlan.parse(values | ours, "group"), layers, helps)

    def with_keep(self, keep: int) -> GroupWorker:
        """Return the same worker, of a group whose first ``keep`` workers become instances.

        Raises ConfigError unless this is the leader and the group has as many workers.
        """
        if self.plan.rank or not 1 <= keep <= self.plan.size:
            raise ConfigError(f"keep: expected 1 to {self.plan.size}, of the group's leader, found {keep}")
        return replace(self, plan=replace(self.plan, then="down" if keep == 1 else "up", keep=keep))

    def released(self) -> GroupWorker:
        """Return the same worker, as one that becomes an instance instead of prefilling for another one.

        Raises ConfigError if it is none that prefills.
        """
        if self.plan.rank == 0 or self.plan.mode != "disaggregated":
            raise ConfigError(f"expected an instance that prefills for another one, found rank {self.plan.rank}")
        return replace(self, plan=replace(self.plan, then="up"))

    def as_instance(self, *, lost: bool = False) -> GroupWorker:
        """Return the same worker once it helps nobody any more. One that has prefilled is one that others can help.

        ``lost``: nobody told it to end that. If its engine is replaced, the new one does not look for the instance that
        this one helped.
        """
        plan = self.plan
        if plan.mode == "live" and plan.rank and plan.then != "up":
            return replace(self, plan=replace(plan, then="up"))
        if plan.rank == 0 or plan.listen is None:
            return self
        return replace(
            self, plan=replace(plan, rank=0, leader=plan.listen, listen=None, then="stay", relieves=False), lost=lost
        )

    @property
    def is_followed(self) -> bool:
        """Whether the worker's timeline shows when it stops sharing its model.

        A leader's does in a group that shares the layers, and a helper's (rank above 0) in all other modes.
        """
        return (self.plan.rank == 0) == (self.plan.mode == "pipeline")

    def status(self, state: str) -> dict[str, Any]:
        """Return the worker's part of its instance's status. ``state`` is from the timeline, if it is followed."""
        plan = self.plan
        if plan.mode == "pipeline":
            found = {"id": plan.group, "rank": plan.rank, "size": plan.size, "full": plan.full, "layers": self.layers}
            return {"group": found | ({"state": state, "keep": plan.keep} if plan.rank == 0 else {})}
        helping = plan.rank > 0 and state in ("serving", "prefilling")
        found = {"helping": helping, "helps": self.helps, "prefills": helping and state == "prefilling"}
        found |= {"lost": self.lost}
        role = "both" if plan.mode == "live" else "prefill" if helping and plan.then != "up" else "decode"
        place = plan.partners_place
        meets = None if place is None or helping else {"group": plan.group, "at": place}
        return {"pair": found | {"role": role, "meets": meets}}

    def environment(self, path: Path) -> dict[str, str]:
        """Write the group's file to ``path``, and return the variables that ``medusa serve`` needs for it."""
        self.write(path)
        return {"MEDUSA_GROUP": str(path)} | ({} if self.layers is None else {"MEDUSA_LAYERS": self.layers})

    def write(self, path: Path) -> None:
        """Write the group's file atomically, readable by this user alone, because it has the group's token."""
        write_private(path, json.dumps(asdict(self.plan)).encode())


def free_port(host: str) -> int:
    """Return a port of this node that is free at this moment."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        return int(found.getsockname()[1])


__all__ = ["GroupWorker", "free_port"]
