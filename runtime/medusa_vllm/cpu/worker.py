"""vLLM's worker on a CPU. It times its work before the first request, and defers what can wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from ..compiled.settings import WorkerCompilation
from ..weights.attached import AttachedRegion
from .lazy_zeros import LazyZeros


@contextmanager
def _no_draws_for_unfinished_prompts(runner: Any) -> Iterator[None]:
    """Keep requests with a seed from drawing random numbers in this context before their prompts are computed.

    vLLM samples for them, too, drops the token, and rewinds the generator, which a CPU's generator cannot do.
    """
    batch, mask = getattr(runner, "input_batch", None), getattr(runner, "discard_request_mask", None)
    if batch is None or mask is None or not batch.generators:
        yield
        return
    kept = {row: one for row, one in batch.generators.items() if row < batch.num_reqs and mask.np[row]}
    for row in kept:
        del batch.generators[row]
    try:
        yield
    finally:
        batch.generators.update(kept)


class CpuWorker(CPUWorker):  # type: ignore[misc]
    """The ``worker_cls`` for a CPU, an option of vLLM that its documentation offers for this."""

    def init_device(self) -> None:
        if self.parallel_config.tensor_parallel_size > 1:  # in a process of its own
            from .ranks import become_rank

            become_rank()
        with self._timeline.stage("device"):
            super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        with self._timeline.stage("load"):
            super().load_model(load_dummy_weights=load_dummy_weights)
        self._compilation.on_model_loaded(self.model_runner.get_model(), self.vllm_config)

    def _should_warm_up_model(self) -> bool:
        return self._compilation.should_warm_up and bool(super()._should_warm_up_model())

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self._compilation.on_warmed_up()
        return times

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with self._timeline.stage("kv_cache"), LazyZeros():
            super().initialize_from_config(kv_cache_config)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with _no_draws_for_unfinished_prompts(self.model_runner):
            return super().sample_tokens(grammar_output)

    @property
    def _timeline(self) -> Any:
        return AttachedRegion.of(self.load_config).timeline

    @cached_property
    def _compilation(self) -> WorkerCompilation:
        return WorkerCompilation(self.load_config, self._timeline)
