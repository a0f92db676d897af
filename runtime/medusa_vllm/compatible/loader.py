"""A loader for any version of vLLM: the region's tensors, whole, in execution order.

It relies on ``BaseModelLoader``, the model's ``load_weights`` and the number of ranks alone. Ranks read all tensors
and copy their slices.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ..shared_memory import remove_names_of_collectives
from ..weights.attached import AttachedRegion
from ..weights.uploading import arriving


class TensorLoader(BaseModelLoader):  # type: ignore[misc]
    """The loader for ``load_format="medusa-tensors"``."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._attached = AttachedRegion.of(load_config)
        remove_names_of_collectives()

    def download_model(self, model_config: Any) -> None:
        self._attached.region.wait_index()

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        region = self._attached.region
        with self._attached.timeline.stage("apply"), arriving(self._attached, model, model_config) as tensors:
            model.load_weights(tensors(region.wait_index().order))  # type: ignore[operator]


__all__ = ["TensorLoader"]
