"""A good citizen of a container: any UID, a read-only root, no /dev/shm, only its temporary folder writable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]

CONFINED = """
set -e
umount /dev/shm 2>/dev/null || true
mount -t tmpfs -o mode=1777 tmpfs "$TMPDIR"
mount -o remount,bind,ro /
! touch /confined-probe 2>/dev/null
exec setpriv --reuid=12345 --regid=12345 --clear-groups --no-new-privs --inh-caps=-all "$@"
"""


def may_confine() -> bool:
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("unshare", "setpriv", "prlimit")):
        return False
    return subprocess.run(["unshare", "--mount", "mount", "-o", "remount,bind,ro", "/"], check=False).returncode == 0


@pytest.mark.root
@pytest.mark.skipif(not may_confine(), reason="needs root, unshare and setpriv to make the confinement")
def test_serves_confined(start: Start, example: Path) -> None:
    serving = start("--model", example, wrapper=["unshare", "--mount", "sh", "-c", CONFINED, "sh"])
    assert serving.complete()["choices"][0]["text"]
    status = Path(f"/proc/{serving.process.pid}/status").read_text()
    assert "Uid:\t12345\t12345\t12345\t12345" in status
    assert "CapEff:\t0000000000000000" in status
    for pid in serving.children():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "/dev/shm/" not in maps
    assert serving.stop() == 0


FULL = """
set -e
umount /dev/shm 2>/dev/null || true
mount -t tmpfs -o mode=1777,{limit} tmpfs "$TMPDIR"
mount -o remount,bind,ro /
{fill}
exec "$@"
"""


@pytest.mark.root
@pytest.mark.skipif(not may_confine(), reason="needs root and unshare to fill a disk of its own")
def test_serves_though_the_disk_is_full(start: Start, example: Path) -> None:
    fill = 'dd if=/dev/zero of="$TMPDIR/fill" bs=1k 2>/dev/null || true'
    script = FULL.format(limit="size=64k", fill=fill)
    serving = start("--model", example, wrapper=["unshare", "--mount", "sh", "-c", script, "sh"])
    assert serving.complete()["choices"][0]["text"]
    large = "x" * 1_000_000
    assert serving.request("POST", "/v1/completions", {"prompt": large})[0] == 400  # too many tokens: it was read
    assert serving.complete()["choices"][0]["text"]
    assert serving.stop() == 0


@pytest.mark.root
@pytest.mark.skipif(not may_confine(), reason="needs root and unshare to fill a disk of its own")
def test_a_disk_that_takes_no_file_is_named(start: Start, example: Path) -> None:
    script = FULL.format(limit="nr_inodes=1", fill="")
    serving = start("--model", example, wrapper=["unshare", "--mount", "sh", "-c", script, "sh"])
    assert serving.wait_gone() == 2
    assert "No space left on device" in serving.output()
    assert "TMPDIR" in serving.output()
    assert "Traceback" not in serving.output()


@pytest.mark.root
@pytest.mark.skipif(not may_confine(), reason="needs root and setpriv to become a user with limits")
@pytest.mark.parametrize(
    ("limit", "named"), [("--nproc=2", "ulimit -u"), ("--nproc=4", "ulimit -u"), ("--as=300000000", "memory")]
)
def test_small_limits_end_it_in_one_line(start: Start, example: Path, limit: str, named: str) -> None:
    nobody = "setpriv --reuid=12345 --regid=12345 --clear-groups --no-new-privs --inh-caps=-all"
    script = f'chmod 777 "$TMPDIR"; exec prlimit {limit} {nobody} "$@"'
    serving = start("--model", example, wrapper=["sh", "-c", script, "sh"])
    assert serving.wait_gone() == 1, serving.output()
    assert "Traceback" not in serving.output()
    said = [line for line in serving.output().splitlines() if line.startswith("medusa: ")]
    assert len(said) == 1
    assert named in said[0]
