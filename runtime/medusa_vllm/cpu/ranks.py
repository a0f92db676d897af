"""Tensor parallel ranks on a CPU, forked from the engine's process, which has imported vLLM. Each has its own CPUs.

vLLM starts an interpreter for each rank, because OpenMP reads the rank's threads and CPUs from its environment, and
each interpreter imports everything again. A forked rank sets them itself, which is possible because the thread that
forks has computed nothing yet.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
import warnings
from contextlib import ExitStack
from multiprocessing import resource_tracker
from unittest.mock import patch

import torch
from medusa_runtime.process import die_with_parent
from torch import distributed
from vllm.distributed import parallel_state
from vllm.v1.executor import multiproc_executor

from ..executor import PreparedWorker
from ..scratch import scratch_folder
from ..shared_memory import QUIET

# vLLM sets the one that the loaded OpenMP reads.
_AFFINITY_VARIABLES = (
    "GOMP_CPU_AFFINITY",
    "OMP_PLACES",
    "KMP_AFFINITY",
)


class RanksExecutor(multiproc_executor.MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor for several processes, which forks them."""

    def _init_executor(self) -> None:
        self._scratch = ExitStack()
        if distributed.is_initialized():  # set by a warm-up, whose threads would be missing in a rank
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's CPU platform has set spawn
        with patch.object(sys, "warnoptions", [*sys.warnoptions, QUIET]):
            resource_tracker.ensure_running()  # removes the ranks' shared memory if the engine ends during the start
        folder = self._scratch.enter_context(scratch_folder("medusa"))
        # The folder holds the ranks' sockets, and the file through which they find each other. A PreparedWorker repeats
        # nothing that was done before the fork.
        with (
            patch.object(tempfile, "tempdir", str(folder)),
            patch.object(multiproc_executor, "WorkerWrapperBase", PreparedWorker),
        ):
            super()._init_executor()

    def shutdown(self) -> None:
        super().shutdown()
        self._scratch.close()


def become_rank() -> None:
    """Make this process a rank: it ends with the engine, drops the engine's connections, and takes its CPUs."""
    die_with_parent(os.getppid())
    drop_sockets()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    cpus = {int(number) for name in _AFFINITY_VARIABLES for number in re.findall(r"\d+", os.environ.get(name, ""))}
    if cpus:  # libgomp has read its environment long ago
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(len(cpus))


def drop_sockets() -> None:
    """Drop the engine's connections: clients only see the engine's end once no rank holds one open."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.dup2(nothing, descriptor, inheritable=False)  # Python objects own the number, so it stays taken
        except OSError:
            pass  # the descriptor that listed the others
    os.close(nothing)


__all__ = ["RanksExecutor", "become_rank", "drop_sockets"]
