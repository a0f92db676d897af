"""A loader for any version of vLLM: the region's tensors, whole, in execution order.

It relies on ``BaseModelLoader`` and the model's ``load_weights`` alone. Ranks read all tensors and copy their slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from medusa_runtime.load.views import Views
from torch import Tensor, nn
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ..weights.attached import AttachedRegion


class TensorLoader(BaseModelLoader):  # type: ignore[misc]
    """The loader for ``load_format="medusa-tensors"``."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._attached = AttachedRegion.of(load_config)

    def download_model(self, model_config: Any) -> None:
        self._attached.region.wait_index()

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        with self._attached.timeline.stage("apply"):
            model.load_weights(self._tensors())  # type: ignore[operator]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        region = self._attached.region
        index, views = region.wait_index(), Views(region)
        for name in index.order:
            region.wait_tensor(name)
            with torch.device("cpu"):
                tensor = views.tensor(name, index.tensors[name])
            yield name, tensor


__all__ = ["TensorLoader"]
