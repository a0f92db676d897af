"""CPU quotas for the nodes of a laboratory, by control groups of version 2, or of version 1 if 2 has no cpu."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from medusa_runtime.errors import LabError

# A node that has used up its share stands still for the rest of a period. Periods of 20 ms come close to a slower CPU.
_PERIOD_US = 20_000
# The highest weights that the kernel takes, so that other processes of the machine leave the nodes their shares.
_WEIGHTS = {"cpu.weight": "10000", "cpu.shares": "262144"}


def make_cgroups(nodes: Sequence[str], cpus: float) -> dict[str, Path]:
    """Make a control group for each node, with so many cores. Raises LabError if the machine does not allow it."""
    reasons = []
    for make in (_second_version, _first_version):
        try:
            return make(nodes, round(cpus * _PERIOD_US))
        except OSError as error:
            reasons.append(str(error))
    raise LabError(f"no processor quotas here: {'; '.join(reasons)}")


def _second_version(nodes: Sequence[str], quota_us: int) -> dict[str, Path]:
    root = _mount_point("cgroup2")
    own = _own_cgroup("")
    for parent in (root / own, *(root / own).parents):
        if not parent.is_relative_to(root):
            break
        with suppress(OSError):  # it has processes of its own, or may not be changed
            return dict(_cgroups(parent, nodes, {"cpu.max": f"{quota_us} {_PERIOD_US}"}, controller="+cpu"))
    raise OSError("cgroup v2 offers no cpu controller")


def _first_version(nodes: Sequence[str], quota_us: int) -> dict[str, Path]:
    root = _mount_point("cgroup", "cpu")
    limits = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
    with suppress(OSError):  # in a container, the path may be the one outside of it
        return dict(_cgroups(root / _own_cgroup("cpu"), nodes, limits))
    return dict(_cgroups(root, nodes, limits))


def _cgroups(
    parent: Path, nodes: Sequence[str], limits: dict[str, str], controller: str = ""
) -> Iterator[tuple[str, Path]]:
    made: list[Path] = []

    def make(group: Path) -> Path:
        group.mkdir()
        made.append(group)
        return group

    try:
        if controller:
            (parent / "cgroup.subtree_control").write_text(controller)
        laboratory = make(parent / f"medusa-lab-{os.getpid()}-{os.urandom(3).hex()}")
        if controller:
            (laboratory / "cgroup.subtree_control").write_text(controller)
        for name, value in _WEIGHTS.items():
            if (laboratory / name).exists():
                (laboratory / name).write_text(value)
        for node in nodes:
            group = make(laboratory / node)
            for name, value in limits.items():
                (group / name).write_text(value)
            yield node, group
    except OSError:
        for group in reversed(made):
            group.rmdir()
        raise


def _mount_point(kind: str, option: str = "") -> Path:
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, place, found, options, *_ = line.split()
            if found == kind and (not option or option in options.split(",")):
                return Path(place)
    raise OSError(f"no {kind} {option}".rstrip() + " is mounted")


def _own_cgroup(controller: str) -> str:
    with open("/proc/self/cgroup") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controller in controllers.split(","):
                return path.lstrip("/")
    return ""
