"""The plan, which has to survive the controller, in a file on the head: deployments and draining nodes."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ConfigError, json_excerpt

from ..deployment import Deployment

logger = logging.getLogger(__name__)

_AGAIN_S = 0.5


@dataclass(frozen=True)
class ClusterPlan:
    deployments: dict[str, Deployment] = field(default_factory=dict)
    draining: Mapping[str, float | None] = field(default_factory=dict)  # node → seconds that its requests may still run
    versions: Mapping[str, list[str]] = field(default_factory=dict)  # URL → versions, in the order of their appearance
    answered: Mapping[str, str] = field(default_factory=dict)  # name → digest of the deployment that has answered last


def read_plan(path: Path) -> ClusterPlan:
    """Return the plan that was written last, or an empty plan if there is none.

    A file without a plan is kept under another name, and an empty plan returned. One with deployments that this version
    refuses is kept, too, and the others are returned. While the disk gives an error, this waits: without its plan, a
    controller would end every instance.
    """
    while True:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return ClusterPlan()
        except OSError as error:
            logger.error("the controller's plan cannot be read (%s); trying again", error)  # noqa: TRY400
            time.sleep(_AGAIN_S)
        else:
            break
    aside, refused = path.with_suffix(".unreadable"), list[str]()
    try:
        found = json.loads(data)
        deployments = list(_deployments(found["deployments"], refused))
        draining = found["draining"] if isinstance(found["draining"], dict) else dict.fromkeys(found["draining"])
        by_name = {item.name: item for item in deployments}
        plan = ClusterPlan(by_name, draining, dict(found["versions"]), dict(found.get("answered", {})))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        path.replace(aside)
        logger.exception("the controller's plan could not be read (%s); it is kept as %s", type(error).__name__, aside)
        return ClusterPlan()
    if refused:
        aside.unlink(missing_ok=True)
        aside.hardlink_to(path)  # which is replaced when it is written, and takes no room on a disk that may be full
        logger.error("the controller's plan is kept as %s, and used without %s", aside, "; ".join(refused))
    return plan


def _deployments(found: Iterable[Any], refused: list[str]) -> Iterator[Deployment]:
    """Yield the deployments of a plan. Those that this version refuses go to ``refused``, in words."""
    for item in found:
        try:
            yield Deployment.from_json(item)
        except ConfigError as error:
            refused.append(f"{json_excerpt(item.get('name'))} ({error})")


def write_plan(path: Path, plan: ClusterPlan) -> None:
    """Write the plan atomically: a kill at any moment leaves either the old file or the new one. Raises OSError."""
    text = json.dumps(
        {
            "deployments": [item.to_json() for item in plan.deployments.values()],
            "draining": dict(plan.draining),
            "versions": dict(plan.versions),
            "answered": dict(plan.answered),
        }
    )
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
