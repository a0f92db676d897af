"""The memory, descriptors, threads, shared memory and files of a tree of processes, by the role of each of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MB = 1 << 20


def footprint(pids: Sequence[int], folders: Sequence[Path] = ()) -> dict[str, float]:
    """Return what these processes hold together, and each role (comm) by itself.

    ``memory ROLE`` is anonymous memory in MB, ``shared`` that of all memfds in MB, each counted once; ``files`` are
    those below the ``folders``, and ``files MB`` their size. All else are numbers of things.
    """
    found: Counter[str] = Counter()
    memfds: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            _add(found, memfds, pid)
    found["shared"] = sum(memfds.values()) // 1024
    held = {
        name: count / 1024 if name.startswith(("memory ", "shared")) else float(count) for name, count in found.items()
    }
    for folder in folders:
        sizes = [path.lstat().st_size for path in folder.rglob("*") if _is_there(path)]
        held["files"] = held.get("files", 0.0) + len(sizes)
        held["files MB"] = held.get("files MB", 0.0) + sum(sizes) / MB
    return held


def _add(found: Counter[str], memfds: dict[int, int], pid: int) -> None:
    role = Path(f"/proc/{pid}/comm").read_text().strip()
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "RssAnon" not in fields:  # a zombie
        found["zombies"] += 1
        return
    found[f"processes {role}"] += 1
    found[f"memory {role}"] += int(fields["RssAnon"].split()[0])
    found[f"threads {role}"] += int(fields["Threads"])
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            path = f"/proc/{pid}/fd/{descriptor}"
            target = os.readlink(path)
            if target.startswith("/proc/"):
                continue
            found[f"descriptors {role}"] += 1
            if "memfd:" in target:
                seen = os.stat(path)
                memfds[seen.st_ino] = seen.st_blocks * 512


def _is_there(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
