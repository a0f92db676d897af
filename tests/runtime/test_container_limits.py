"""Container limits, from trees of files as the kernel shows them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from medusa_runtime.container_limits import OutOfMemory, cpu_count, memory_available_bytes, memory_limit_bytes

GIB = 1 << 30
V1_UNLIMITED = "9223372036854771712\n"
V2_MOUNT = "30 23 0:26 {top} /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"
V1_MOUNTS = (
    "30 23 0:26 {top} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    "31 23 0:27 {top} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
)


def tree(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """A root folder with these cgroup files, on a host that has 8 GiB available."""
    fixed = {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": "22 1 0:20 / /proc rw - proc proc rw\n" + mounts,
        "proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n",
    }
    for name, text in (fixed | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(root: Path, files: dict[str, str], path: str = "/", top: str = "/") -> Path:
    return tree(root, f"0::{path}\n", V2_MOUNT.format(top=top), files)


def v1(root: Path, files: dict[str, str], path: str = "/", top: str = "/") -> Path:
    return tree(root, f"4:memory:{path}\n3:cpu,cpuacct:{path}\n0::/\n", V1_MOUNTS.format(top=top), files)


def test_v2_limits(tmp_path: Path) -> None:
    stat = f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB // 2}\n"
    root = v2(tmp_path, {"memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": stat})
    assert memory_limit_bytes(root) == 4 * GIB
    assert memory_available_bytes(root) == GIB + GIB // 2


def test_files_that_this_process_maps_are_not_free(tmp_path: Path) -> None:
    """A snapshot's pages, which have been read ahead: the kernel would drop them, and read them again and again."""
    stat = f"active_file {GIB // 4}\ninactive_file {GIB}\n"
    root = v2(tmp_path, {"memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": stat})
    for mapped, free in ((0, GIB), (GIB // 4, GIB), (GIB // 2, GIB // 4 * 3), (2 * GIB, 0)):
        (root / "proc/self/status").write_text(f"RssFile:\t{mapped // 1024} kB\n")
        assert memory_available_bytes(root) == GIB + free


def test_v2_without_limits(tmp_path: Path) -> None:
    files = {"memory.max": "max\n", "memory.current": f"{3 * GIB}\n", "cpu.max": "max 100000\n"}
    root = v2(tmp_path, files)
    assert memory_limit_bytes(root) is None
    assert memory_available_bytes(root) == 8 * GIB
    assert cpu_count(root) == len(os.sched_getaffinity(0))


def test_a_parents_limit_counts(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": f"{2 * GIB}\n",
        "pod/memory.current": f"{GIB}\n",
        "pod/app/memory.max": f"{6 * GIB}\n",
        "pod/app/memory.current": "4096\n",
    }
    root = v2(tmp_path, files, path="/pod/app")
    assert memory_limit_bytes(root) == 2 * GIB
    assert memory_available_bytes(root) == GIB


def test_usage_over_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = v2(tmp_path, {"memory.max": f"{GIB}\n", "memory.current": f"{GIB + 4096}\n"})
    assert memory_available_bytes(root) == 0


def test_v1_limits(tmp_path: Path) -> None:
    # The plain fields count this group alone; only total_ includes the groups below it, as the usage does.
    stat = f"inactive_file 0\nhierarchical_memory_limit {2 * GIB}\ntotal_inactive_file {GIB // 4}\n"
    files = {
        "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory/memory.usage_in_bytes": f"{GIB}\n",
        "memory/memory.stat": stat,
    }
    root = v1(tmp_path, files)
    assert memory_limit_bytes(root) == 2 * GIB
    assert memory_available_bytes(root) == GIB + GIB // 4


def test_v1_unlimited(tmp_path: Path) -> None:
    root = v1(tmp_path, {"memory/memory.limit_in_bytes": V1_UNLIMITED, "memory/memory.usage_in_bytes": "4096\n"})
    assert memory_limit_bytes(root) is None


def test_v1_limit_of_an_unseen_parent(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": V1_UNLIMITED,
        "memory/memory.stat": f"hierarchical_memory_limit {GIB}\n",
    }
    assert memory_limit_bytes(v1(tmp_path, files)) == GIB


def test_path_of_the_host_under_a_containers_mount(tmp_path: Path) -> None:
    """Docker without a cgroup namespace: /proc names the host's path, the mount shows the container's group."""
    files = {"memory/memory.limit_in_bytes": f"{GIB}\n"}
    assert memory_limit_bytes(v1(tmp_path / "bind", files, path="/docker/abc", top="/docker/abc")) == GIB
    assert memory_limit_bytes(v1(tmp_path / "other", files, path="/docker/abc", top="/")) == GIB


def test_a_path_outside_the_namespace(tmp_path: Path) -> None:
    assert memory_limit_bytes(v2(tmp_path, {"memory.max": f"{GIB}\n"}, path="/../sibling")) == GIB


def test_one_cpu_of_quota(tmp_path: Path) -> None:
    assert cpu_count(v2(tmp_path / "v2", {"cpu.max": "100000 100000\n"})) == 1
    assert cpu_count(v2(tmp_path / "part", {"cpu.max": "5000 100000\n"})) == 1
    quota = {"cpu,cpuacct/cpu.cfs_quota_us": "20000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}
    assert cpu_count(v1(tmp_path / "v1", quota)) == 1


def test_quota_is_rounded_up_but_not_over_the_affinity(tmp_path: Path) -> None:
    usable = len(os.sched_getaffinity(0))
    assert cpu_count(v2(tmp_path / "a", {"cpu.max": "150000 100000\n"})) == min(usable, 2)
    assert cpu_count(v2(tmp_path / "b", {"cpu.max": "99900000 100000\n"})) == usable
    none = {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}
    assert cpu_count(v1(tmp_path / "c", none)) == usable


def test_affinity_of_this_process() -> None:
    """In a process bound to one CPU, as taskset or a static CPU manager does it."""
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    script += "from medusa_runtime.container_limits import OutOfMemory, cpu_count; print(cpu_count())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"1\n"


def test_without_any_cgroup_files(tmp_path: Path) -> None:
    root = tree(tmp_path, "", "", {})
    assert cpu_count(root) >= 1
    assert memory_limit_bytes(root) is None
    assert memory_available_bytes(root) == 8 * GIB


def test_mounts_whose_paths_are_no_text(tmp_path: Path) -> None:
    root = v2(tmp_path, {"memory.max": f"{GIB}\n"})
    with (root / "proc/self/mountinfo").open("ab") as mounts:
        mounts.write(b"40 23 0:30 / /mnt/caf\xe9\x1c rw - cgroup\n")
    assert memory_limit_bytes(root) == GIB


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGRTMIN + 6)
    assert OutOfMemory(v2(tmp_path, {})).how(process.wait()) == f"killed by signal {signal.SIGRTMIN + 6}"


def test_this_machine() -> None:
    assert 1 <= cpu_count() <= len(os.sched_getaffinity(0))
    assert memory_available_bytes() > 16 << 20
    limit = memory_limit_bytes()
    assert limit is None or limit > 16 << 20


@pytest.mark.parametrize(("make", "name"), [(v2, "memory.events"), (v1, "memory/memory.oom_control")])
def test_a_kill_for_want_of_memory_is_told_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Path], name: str
) -> None:
    limit = {"memory.events": "memory.max", "memory/memory.oom_control": "memory/memory.limit_in_bytes"}[name]
    root = make(tmp_path, {name: "oom_kill_disable 0\noom_kill 3\n", limit: "1500000000\n"})
    watch = OutOfMemory(root)
    assert not watch.look()
    assert watch.how(-9) == "killed by SIGKILL"
    (root / "sys/fs/cgroup" / name).write_text("oom_kill_disable 0\noom_kill 4\n")
    assert watch.how(-11) == "killed by SIGSEGV"
    assert watch.how(1) == "exit status 1"
    for _ in "the one", "another that the same kill has ended":
        assert watch.how(-9) == "killed by SIGKILL: memory ran out, the limit is 1.50 GB"
    later = time.monotonic() + 6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert watch.how(-9) == "killed by SIGKILL"


def test_without_a_count_of_kills_none_is_for_want_of_memory(tmp_path: Path) -> None:
    assert OutOfMemory(v2(tmp_path, {})).how(-9) == "killed by SIGKILL"
