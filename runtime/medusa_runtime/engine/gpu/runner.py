"""Runs steps on a GPU: decodes by graphs where there are any, everything else launched by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ...errors import StateError
from ...load.loader import Loader
from ...models import DecoderModel
from ...timeline import Timeline
from ..serving.sequence import Sampled, Sequence, Span
from ..torch.kv_cache import KvCache
from ..torch.runner import run_step
from ..torch.sampler import sample
from .attention import GpuAttention
from .decode_graphs import DecodeGraphs, Restorer, obstacle, sizes_for
from .device import BundledGraphs, Gpu

logger = logging.getLogger(__name__)


class GpuRunner:
    """Runs an engine's steps, in the engine's thread. ``graphs`` is None where decodes cannot be captured."""

    def __init__(
        self,
        gpu: Gpu,
        model: DecoderModel,
        cache: KvCache,
        loader: Loader,
        *,
        max_concurrency: int,
        max_model_len: int,
        timeline: Timeline,
        blueprints: BundledGraphs | None = None,
    ) -> None:
        """Set up graphs for the model's decode steps, where they can be captured.

        ``blueprints``: the state bundle's graphs. They are read once, when the weights are loaded, and reading may
        wait.
        """
        self._gpu = gpu
        self.model = model
        self.cache = cache
        self.loader = loader
        self._timeline = timeline
        self._blueprints = blueprints
        self._restored: BundledGraphs | None = None  # whose graphs are in use
        self._restorer: Restorer | None = None
        self._to_restore: list[int] = []  # sizes that the bundle has, and that are not restored yet
        self.graphs: DecodeGraphs | None = None
        capturer = gpu.capturer()
        reason = obstacle(model) if capturer is not None else "there is no attention kernel that can be captured"
        if capturer is None or reason is not None:
            logger.warning("decode steps run without a CUDA graph: %s", reason)
            return
        self.graphs = DecodeGraphs(
            model,
            cache,
            capturer,
            sizes=sizes_for(max_concurrency),
            max_model_len=max_model_len,
            memory=gpu.memory,
            timeline=timeline,
        )

    def step(self, spans: list[Span]) -> tuple[Tensor | None, list[Sequence]]:
        """Run one step, like ``run_step``. A graph does not wait at gates, so it needs all weights to be loaded."""
        graphs = self.graphs
        if graphs is not None and self.loader.applied and self._must_restore_first:
            self._restore(graphs)  # waits for nothing else, so the first decode is as good a moment as an idle one
        if graphs is None or not self.loader.applied or not graphs.can_run(spans):
            return run_step(self.model, self.cache, spans, GpuAttention)
        try:
            logits = graphs.run(spans)
        except Exception as error:
            self._check_context(error)
            raise
        for span in spans:
            span.sequence.computed = span.stop
        return logits, [span.sequence for span in spans]

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        try:
            with self._gpu.working():
                return sample(logits, sequences)  # the first call that waits for the device
        except Exception as error:
            self._check_context(error)
            raise

    def use_idle_time(self) -> bool:
        """Restore graphs, the most useful first, then capture those that are missing. Returns whether there was work.

        A bundle's graphs are built while the weights come, and checked by a replay, which needs them. Nothing is
        captured while these are loading, since it may be in vain. The sizes that are not restored first come one by
        one; meanwhile batches run in the next larger one.
        """
        graphs = self.graphs
        if graphs is None or not self.loader.placed or not graphs.pending:
            return False
        if self._blueprints is not None:
            # A request that waits for weights must not wait for graphs.
            return self._begin(graphs, wait=self.loader.applied)
        if self._to_restore:
            if not self.loader.applied:
                return False
            self._restore(graphs)
            return True
        graphs.capture_next()
        return True

    @property
    def _must_restore_first(self) -> bool:
        """Whether the bundle's most useful graphs are still to be restored."""
        return self.graphs is not None and (self._blueprints is not None or bool(self._first(self.graphs)))

    def _begin(self, graphs: DecodeGraphs, *, wait: bool) -> bool:
        """Read the bundle's graphs and build the first ones, which needs the weights' places and not their bytes.

        Returns whether they were there. ``wait``: until they are.
        """
        blueprints, self._blueprints = self._blueprints, None
        assert blueprints is not None
        if not wait and not blueprints.has_come():
            self._blueprints = blueprints
            return False
        with self._timeline.stage("prepare_graphs") as detail, self._surviving():
            data = blueprints.read()
            if data is not None:
                self._restored = blueprints
                self._restorer = self._gpu.restorer(self.model, graphs)
                self._to_restore = list(self._restorer.begin(data))
                self._restorer.build(self._first(graphs))
            detail["graphs"] = len(self._to_restore)
        return True

    def _restore(self, graphs: DecodeGraphs) -> None:
        """Restore the graphs that serve most, or, when these are there, one more."""
        if self._blueprints is not None:
            self._begin(graphs, wait=True)
        sizes = self._first(graphs) or self._to_restore[:1]
        if self._restorer is None or not sizes:
            return
        self._to_restore = [size for size in self._to_restore if size not in sizes]
        with self._timeline.stage("restore_graphs") as detail, self._surviving():
            graphs.adopt(self._restorer.restore_sizes(sizes))
            detail["graphs"] = len(graphs.graphs)

    def _first(self, graphs: DecodeGraphs) -> list[int]:
        return [size for size in graphs.first_sizes if size in self._to_restore]

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Go on without the bundle's graphs after any error but a broken context: a bundle never fails a start."""
        try:
            yield
        except StateError as error:
            self._to_restore = []
            logger.warning("CUDA graphs are captured, not restored: %s", error)
        except Exception as error:  # noqa: BLE001
            self._to_restore = []
            self._check_context(error)
            logger.warning("CUDA graphs are captured, not restored: %s: %s", type(error).__name__, error)

    def _check_context(self, error: Exception) -> None:
        """After an error, end this process if the context is broken, since nothing works in it any more.

        The graphs are quarantined first, so that the next engine does not use them. Does nothing if the context is
        whole.
        """
        if self._restored is None or not self._gpu.lost(error):
            return
        if not self._restored.quarantine(str(error)):
            raise error
        logger.error("a restored CUDA graph broke the device's context (%s); the next engine captures them", error)
        self._gpu.abandon()
