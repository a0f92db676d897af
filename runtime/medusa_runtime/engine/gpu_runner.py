"""Steps on a GPU: decodes by graphs where there are any, everything else launched by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from ..errors import DeviceError
from ..models import DecoderModel
from ..timeline import Timeline
from ..weights.loader import Loader
from .decode_graphs import DecodeGraphs, obstacle, sizes_for
from .gpu import Gpu
from .gpu_attention import GpuAttention
from .kv_cache import KvCache
from .runner import run_step
from .sampler import Sampled, sample
from .sequence import Sequence, Span

logger = logging.getLogger(__name__)


class GpuRunner:
    """Belongs to the engine's thread. ``graphs`` is None where there can be none."""

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
        blueprints: Callable[[], bytes | None] | None = None,
    ) -> None:
        """``blueprints`` gives the state bundle's graphs; called once, when the weights are there, and may wait."""
        self._gpu = gpu
        self.model = model
        self.cache = cache
        self.loader = loader
        self._timeline = timeline
        self._blueprints = blueprints
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
        """As ``run_step``. A graph passes no gates, so it runs only when all weights are there."""
        graphs = self.graphs
        if graphs is not None and self.loader.applied and self._blueprints is not None:
            self._restore(graphs)  # waits for nothing else: the first decode is as good a moment as an idle one
        if graphs is None or not self.loader.applied or not graphs.can_run(spans):
            return run_step(self.model, self.cache, spans, GpuAttention)
        logits = graphs.run(spans)
        for span in spans:
            span.sequence.computed = span.stop
        return logits, [span.sequence for span in spans]

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        with self._gpu.working():
            return sample(logits, sequences)

    def use_idle_time(self) -> bool:
        """Restore the graphs once, then capture those that are missing; whether there was something to do.

        What a bundle holds is checked by a replay, which needs weights; so nothing is captured while they come, lest
        it was in vain.
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
        with self._timeline.stage("restore_graphs") as detail:
            try:
                data = blueprints() if blueprints is not None else None
                if data is not None:
                    graphs.adopt(self._gpu.restored(self.model, graphs, data))
            except DeviceError:
                raise  # the context is lost
            except Exception as error:  # noqa: BLE001 - a bundle never makes a start fail
                logger.warning("CUDA graphs are captured, not restored: %s: %s", type(error).__name__, error)
            detail["graphs"] = len(graphs.graphs)
