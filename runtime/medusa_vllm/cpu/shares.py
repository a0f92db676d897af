"""Divides an engine's CPUs among its ranks."""

from __future__ import annotations

import os

from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"  # without it, vLLM uses all CPUs, and requires a NUMA node for each rank


def cpu_shares(settings: Settings) -> str:
    """Return the CPUs of each rank, as vLLM's VARIABLE has them. Raises ConfigError if there are too few."""
    ranks, cpus = settings.tensor_parallel, sorted(os.sched_getaffinity(0))[: settings.threads]
    if len(cpus) < ranks:
        raise ConfigError(f"--tensor-parallel={ranks} cannot be used: expected a CPU for each, found {len(cpus)}")
    return "|".join(",".join(map(str, cpus[rank::ranks])) for rank in range(ranks))


__all__ = ["VARIABLE", "cpu_shares"]
