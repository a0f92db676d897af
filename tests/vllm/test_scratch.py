"""vLLM's processes leave nothing when they are killed, not even names in /dev/shm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from medusa_vllm.scratch import Guard

# As vLLM's server while it starts: one process has made a queue and a lock that no other has opened yet.
_SERVER = """
import signal, time
from multiprocessing import get_context, resource_tracker, shared_memory

signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = get_context("spawn").Lock()
queue = shared_memory.SharedMemory(create=True, size=1 << 20)
print(resource_tracker._resource_tracker._pid, queue.name, lock._semlock.name.replace("/", "sem."), flush=True)
time.sleep(600)
"""


def test_names_of_a_killed_group_go_even_if_pythons_own_tracker_gets_no_cpu(tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    guard = Guard(folder)
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as server:
        guard.end_group(server.pid)
        assert server.stdout is not None
        tracker, *names = server.stdout.readline().split()
        assert all(Path("/dev/shm", name).exists() for name in names)
        os.kill(int(tracker), signal.SIGSTOP)  # as on a busy machine
        guard.close()
        assert server.wait(60) == -signal.SIGKILL
    assert not any(Path("/dev/shm", name).exists() for name in names)
    assert not folder.exists()
