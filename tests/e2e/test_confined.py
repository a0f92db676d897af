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
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    return subprocess.run(["unshare", "--mount", "mount", "-o", "remount,bind,ro", "/"], check=False).returncode == 0


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
