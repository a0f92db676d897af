"""vLLM's executor for one process. It skips what was done before the fork."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import HashStore
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.worker_base import WorkerWrapperBase

from .serving.replacement import patch_function


class OneProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """One rank in the engine's own process.

    There are no messages between ranks, for which vLLM takes 160 MB of /dev/shm.
    """

    def _init_executor(self) -> None:
        self.driver_worker = PreparedWorker(rpc_rank=0)
        rank = {"local_rank": 0, "rank": 0, "distributed_init_method": "env://", "is_driver_worker": True}
        with _list_cpus_once():
            self.driver_worker.init_worker([{"vllm_config": self.vllm_config, **rank}])
            join_group_of_one(self.vllm_config)
            self.driver_worker.init_device()
        self.driver_worker.load_model()
        current_platform.update_block_size_for_backend(self.vllm_config)

    def on_failed_step(self, error: Exception) -> None:
        """Let the worker look at what a step has raised, if it is one that does. A GPU's may end the process."""
        if look := getattr(self.driver_worker.worker, "on_failed_step", None):
            look(error)

    def shutdown(self) -> None:
        """Keep the process groups, since a process may run a second engine."""
        envs.disable_envs_cache()


class PreparedWorker(WorkerWrapperBase):  # type: ignore[misc]
    def init_worker(self, all_kwargs: list[dict[str, Any]]) -> None:
        """Make the worker, like vLLM's method, but without replacing Triton's kernels.

        That would go through all modules, and ``preimport`` has done it.
        """
        kwargs = all_kwargs[self.rpc_rank]
        kwargs.pop("shared_worker_lock", None)  # for the caches of encoders, which text models do not have
        self.vllm_config = kwargs["vllm_config"]
        self.mm_receiver_cache = None
        with set_current_vllm_config(self.vllm_config):
            self.worker = resolve_obj_by_qualname(self.vllm_config.parallel_config.worker_cls)(**kwargs)


def join_group_of_one(config: Any) -> None:
    """Set up what vLLM needs of torch.distributed, with a store in memory. May be called twice."""
    if not distributed.is_initialized():
        backend = current_platform.dist_backend
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    with set_current_vllm_config(config), _one_process_group():
        parallel_state.init_distributed_environment(1, 0, "env://", 0, current_platform.dist_backend)
        parallel_state.ensure_model_parallel_initialized(1, 1)


def _one_process_group() -> AbstractContextManager[None]:
    """Let one process group serve for all of vLLM's on a CPU. They have the same rank, and three threads each."""
    if not current_platform.is_cpu():
        return nullcontext()  # groups for tensors on a GPU and for others differ
    return patch_function("torch.distributed", "new_group", lambda before, *_, **__: distributed.group.WORLD)


def _list_cpus_once() -> AbstractContextManager[None]:
    """Let vLLM run lscpu once, in place of twice."""
    found: list[Any] = []

    def once(before: Callable[[], Any]) -> Any:
        if not found:
            found.append(before())
        return found[0]

    return patch_function("vllm.utils.cpu_resource_utils", "_get_cpu_list", once)


__all__ = ["OneProcessExecutor", "PreparedWorker", "join_group_of_one"]
