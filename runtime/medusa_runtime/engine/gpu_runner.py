"""Steps on a GPU: decodes by graphs where there are any, everything else launched by hand."""

from __future__ import annotations

import logging

from torch import Tensor

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
    ) -> None:
        self._gpu = gpu
        self._model = model
        self._cache = cache
        self._loader = loader
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
        if graphs is None or not self._loader.applied or not graphs.can_run(spans):
            return run_step(self._model, self._cache, spans, GpuAttention)
        logits = graphs.run(spans)
        for span in spans:
            span.sequence.computed = span.stop
        return logits, [span.sequence for span in spans]

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        with self._gpu.working():
            return sample(logits, sequences)

    def use_idle_time(self) -> bool:
        """Capture one more graph, if one is missing; whether there was something to do."""
        if self.graphs is None or not self._loader.placed or not self.graphs.pending:
            return False
        self.graphs.capture_next()
        return True
