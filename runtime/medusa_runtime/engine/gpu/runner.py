"""Runs steps on a GPU: decodes by graphs where there are any, everything else launched by hand."""

from __future__ import annotations

import logging

from torch import Tensor

from ...errors import StateError
from ...load.loader import Loader
from ...models import DecoderModel
from ...timeline import Timeline
from ..serving.sequence import Sequence, Span
from ..torch.kv_cache import KvCache
from ..torch.runner import run_step
from ..torch.sampler import Sampled, sample
from .attention import GpuAttention
from .decode_graphs import DecodeGraphs, obstacle, sizes_for
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
        if graphs is not None and self.loader.applied and self._blueprints is not None:
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
        """Restore the graphs once, then capture those that are missing. Returns whether there was something to do.

        A bundle's graphs are checked by a replay, which needs the weights. Nothing is captured while these are loading,
        since it may be in vain.
        """
        graphs = self.graphs
        if graphs is None or not self.loader.placed or not graphs.pending:
            return False
        if self._blueprints is not None:
            if not self.loader.applied:
                return False
            self._restore(graphs)
            return True
        graphs.capture_next()
        return True

    def _restore(self, graphs: DecodeGraphs) -> None:
        blueprints, self._blueprints = self._blueprints, None
        assert blueprints is not None
        with self._timeline.stage("restore_graphs") as detail:
            try:
                data = blueprints.read()
                if data is not None:
                    self._restored = blueprints
                    graphs.adopt(self._gpu.restored(self.model, graphs, data))
            except StateError as error:
                logger.warning("CUDA graphs are captured, not restored: %s", error)
            except Exception as error:  # noqa: BLE001 - a bundle never makes a start fail
                self._check_context(error)
                logger.warning("CUDA graphs are captured, not restored: %s: %s", type(error).__name__, error)
            detail["graphs"] = len(graphs.graphs)

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
