"""The end of a process that is measured or tested."""

from __future__ import annotations

import sys
from pathlib import Path

from medusa_adapters.bench.process import Process

# As an engine in vLLM's compatible mode, whose server is starting and takes no SIGTERM.
_ENGINE = """
import subprocess, sys, time
from pathlib import Path
from medusa_vllm.scratch import Guard

server = '''
import signal, time
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
queue = shared_memory.SharedMemory(create=True, size=1 << 20)
print(queue.name, flush=True)
time.sleep(600)
'''
guard = Guard(Path(sys.argv[1]))
running = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, process_group=0)
guard.end_group(running.pid)
print(running.stdout.readline().decode(), flush=True)
time.sleep(600)
"""


class Killed(Process):
    grace_s = 0.0


def test_what_removes_names_of_killed_processes_is_not_killed_with_them(tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    with Killed([sys.executable, "-c", _ENGINE, str(folder)]) as engine:
        name = engine.line().strip()
        assert Path("/dev/shm", name).exists()
    assert not Path("/dev/shm", name).exists()
    assert not folder.exists()
