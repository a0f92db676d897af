"""Runs steps on a GPU: decodes with CUDA graphs where there are any, and everything else eagerly."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from ...errors import DeviceError, StateError
from ...models import DecoderModel
from ...timeline import Timeline
from ..serving.sequence import SampledToken, Sequence, Span
from ..torch.kv_cache import KvCache
from ..torch.runner import Forward, run_step
from ..torch.sampler import sample
from .attention import GpuAttention
from .decode_graphs import DecodeGraphs, Restorer, sizes_for
from .decode_kernels import DecodeKernels
from .device import BundledGraphs, Gpu
from .static_inputs import INPUTS, OUTPUTS

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """The weights of all layers that an engine will have, as far as graphs depend on them. ``Loader`` is one."""

    @property
    def placed(self) -> bool:
        """Whether every parameter has its address on the device."""

    @property
    def applied(self) -> bool:
        """Whether every parameter has its value."""


class GpuRunner:
    """Runs an engine's steps, in the engine's thread. ``graphs`` is None if decode steps cannot be captured."""

    def __init__(
        self,
        gpu: Gpu,
        model: DecoderModel,
        cache: KvCache,
        weights: Weights,
        *,
        max_concurrency: int,
        max_model_len: int,
        timeline: Timeline,
        blueprints: BundledGraphs | None = None,
        has_all_layers: bool = True,
    ) -> None:
        """Prepare for graphs of the model's decode steps, if these can be captured.

        ``has_all_layers``: whether this engine has, or will have, all of the model's layers. Otherwise it runs no
        whole step, and gets no graphs.
        ``blueprints``: the state bundle's graphs. They are read once, as soon as the weights have their addresses. If
        they arrive later than the weights, prompts are computed meanwhile, and the first decode waits for them.
        """
        self._gpu = gpu
        self.model = model
        self.cache = cache
        self._weights = weights
        self._timeline = timeline
        self._blueprints = blueprints
        self._restored: BundledGraphs | None = None  # the bundle's graphs, once they may be in use
        self._restorer: Restorer | None = None
        self._to_restore: list[int] = []  # sizes that the bundle has and that have not been restored yet
        self._adopted = False  # whether a graph of the bundle is in use
        self._to_build: list[int] = []  # those of them to build while the weights are loading
        self._kernels = DecodeKernels(model.config, cache.shape.dtype, cache.pool.device, timeline)
        self.graphs: DecodeGraphs | None = None
        if not has_all_layers:
            return
        capturer = gpu.capturer()
        if capturer is None:
            logger.warning("decode steps run without a CUDA graph: there is no attention kernel that can be captured")
            return
        try:
            self.graphs = DecodeGraphs(
                model,
                cache,
                capturer,
                sizes=sizes_for(max_concurrency),
                max_model_len=max_model_len,
                memory=gpu.memory,
                timeline=timeline,
            )
        except (DeviceError, RuntimeError) as error:  # too little of the GPU's memory, or of pinned memory
            for name in (INPUTS, OUTPUTS):
                gpu.free(name)
            logger.warning("decode steps run without a CUDA graph: %s", error)

    def prepare(self, *, eagerly: bool = False) -> None:
        """Begin to make the kernels of decode steps ready, unless all of these will run in a bundle's graphs."""
        if eagerly or self.graphs is None or self._blueprints is None:
            self._kernels.begin()

    def step(self, spans: list[Span]) -> tuple[Tensor | None, list[Sequence]]:
        """Run one step, like ``run_step``. Graphs do not wait at gates, so they need all weights to be loaded."""
        graphs = self.graphs
        if graphs is not None and self._weights.applied and graphs.are_decodes(spans):
            # The weights are loaded, so this need not wait until the engine is idle. A prompt is computed without it.
            self._get_graph(graphs, spans)
        if graphs is None or not self._weights.applied or not graphs.can_run(spans):
            self._wait_for_kernels(spans)
            return run_step(self.model, self.cache, spans, GpuAttention)
        try:
            logits = graphs.run(spans)
        except Exception as error:
            self._check_context(error)
            raise
        for span in spans:
            span.sequence.computed = span.stop
        return logits, [span.sequence for span in spans]

    def forward(self, spans: list[Span], hidden: Tensor | None = None) -> Forward:
        self._wait_for_kernels(spans)
        return Forward(self.model, self.cache, spans, hidden, GpuAttention)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        try:
            with self._gpu.as_default_device():
                return sample(logits, sequences)  # the first call that waits for the device
        except Exception as error:
            self._check_context(error)
            raise

    def use_idle_time(self) -> bool:
        """Restore graphs, the most useful first, then capture those that are missing. Returns whether there was work.

        A bundle's graphs are built one by one while the weights are loading, so that a request waits for one at most,
        and checked by a replay once they are loaded. Until then nothing is captured, since that may turn out to be
        unnecessary. After the most useful sizes the others are restored one by one, unless a step has needed them.
        """
        graphs = self.graphs
        if graphs is None or not self._weights.placed or not graphs.pending:
            return False
        if self._blueprints is not None:  # if they have not arrived, no prompt must wait for them
            return self._begin(graphs, wait=False)
        if self._to_restore:
            if not self._weights.applied:
                return self._build_next()
            self._restore(graphs)
            return True
        self._kernels.begin()
        if self._kernels.under_way:  # a prompt can be computed meanwhile
            return False
        graphs.capture_next()
        return True

    def close(self) -> None:
        self._kernels.wait()

    def _get_graph(self, graphs: DecodeGraphs, spans: list[Span]) -> None:
        """Restore or capture what a decode step needs next, since an engine with work may never be idle."""
        size = graphs.size_for(len(spans), self._to_restore)
        if self._must_restore_first:
            self._restore(graphs)
        elif size in self._to_restore:
            self._restore(graphs, size)
        elif size is None or not self._restores:
            self._wait_for_kernels(spans)
            graphs.capture_for(len(spans))

    def _wait_for_kernels(self, spans: list[Span]) -> None:
        """Wait for the kernels of decode steps if a step has a decode, and a thread makes them ready."""
        if self._kernels.under_way and any(span.stop - span.start == 1 for span in spans):
            self._kernels.wait()

    @property
    def _restores(self) -> bool:
        """Whether graphs of the bundle may still be restored."""
        return self._blueprints is not None or bool(self._to_restore)

    @property
    def _must_restore_first(self) -> bool:
        """Whether the bundle's most useful graphs have not been restored yet."""
        return self.graphs is not None and (self._blueprints is not None or bool(self._first_pending(self.graphs)))

    def _begin(self, graphs: DecodeGraphs, *, wait: bool) -> bool:
        """Read the bundle's graphs and map their memory, which needs the weights' addresses but not their bytes.

        Returns False if the bundle's graphs have not arrived yet. With ``wait``, waits for them.
        """
        blueprints, self._blueprints = self._blueprints, None
        assert blueprints is not None
        if not wait and not blueprints.has_arrived():
            self._blueprints = blueprints
            return False
        with self._timeline.stage("prepare_graphs") as detail, self._tolerate_errors():
            data = blueprints.read()
            if data is not None:
                self._restored = blueprints
                self._restorer = self._gpu.restorer(self.model, graphs)
                self._to_restore = list(self._restorer.begin(data))
                self._to_build = self._first_pending(graphs)
            detail["graphs"] = len(self._to_restore)
        self._release_unused()
        return True

    def _build_next(self) -> bool:
        """Build one of the most useful graphs, which needs no weights. Returns whether there was one."""
        if self._restorer is None or not self._to_build:
            return False
        with self._timeline.stage("build_graph") as detail, self._tolerate_errors():
            detail["batch"] = size = self._restorer.build_one(self._to_build)
            self._to_build.remove(size)
        self._release_unused()
        return True

    def _restore(self, graphs: DecodeGraphs, size: int | None = None) -> None:
        """Restore the most useful graphs, or one more if these have been restored: that of ``size``, or any."""
        if self._blueprints is not None:
            self._begin(graphs, wait=True)
        sizes = self._first_pending(graphs) or (self._to_restore[:1] if size is None else [size])
        if self._restorer is None or not sizes:
            return
        self._to_restore = [size for size in self._to_restore if size not in sizes]
        with self._timeline.stage("restore_graphs") as detail, self._tolerate_errors():
            restored = self._restorer.restore_sizes(sizes)
            graphs.adopt(restored)
            self._adopted |= bool(restored)
            detail["graphs"] = len(graphs.graphs)
        self._release_unused()

    def _release_unused(self) -> None:
        """If no graph of the bundle is in use, and none is left, free their memory: captured ones need as much."""
        if self._restorer is not None and not self._to_restore and not self._adopted:
            self._restorer.close()
            self._restorer = None

    def _first_pending(self, graphs: DecodeGraphs) -> list[int]:
        return [size for size in graphs.first_sizes if size in self._to_restore]

    @contextmanager
    def _tolerate_errors(self) -> Iterator[None]:
        """Log an error, and go on without the bundle's graphs, since a bundle never fails a start.

        An error that has broken the CUDA context ends the process.
        """
        try:
            yield
        except StateError as error:
            self._to_restore, self._to_build = [], []
            logger.warning("CUDA graphs are captured, not restored: %s", error)
        except Exception as error:  # noqa: BLE001
            self._to_restore, self._to_build = [], []
            self._check_context(error)
            logger.warning("CUDA graphs are captured, not restored: %s: %s", type(error).__name__, error)

    def _check_context(self, error: Exception) -> None:
        """End this process if restored graphs have broken the CUDA context, since nothing works in it any more.

        Call it after an error. The graphs are quarantined first, so that the next engine does not use them; if that
        fails, ``error`` is raised again.
        """
        if self._restored is None or not self._gpu.context_is_lost(error):
            return
        if not self._restored.quarantine(str(error)):
            raise error
        logger.error("a restored CUDA graph broke the device's context (%s); the next engine captures them", error)
        self._gpu.abort_process()
