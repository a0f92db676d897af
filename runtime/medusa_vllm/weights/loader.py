"""vLLM's loader over our region: returns each tensor as soon as its bytes are there, in execution order."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from medusa_runtime.checkpoint.order import layers_first
from medusa_runtime.errors import MismatchError, ModelError
from torch import Tensor, nn
from vllm.config import replace
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from ..cpu.linear import use_stored_weights
from ..lean_imports import avoid_cache_folder
from ..shared_memory import remove_names_of_collectives
from .attached import AttachedRegion, layers_of
from .completeness import warn_of_missing
from .sharing import share_weights
from .uploading import Arriving, arriving, tensors


class RegionLoader(DefaultModelLoader):  # type: ignore[misc]
    """The loader for ``load_format="medusa"``. Names, quantization, checks and slices for ranks are vLLM's.

    It reads views of tensors, so a rank that takes a slice touches only that slice's pages. A process with a range of
    layers does not wait for other layers. On a GPU, tensors are copied there by a link meanwhile.
    """

    def __init__(self, load_config: Any) -> None:
        # vLLM's class refuses settings that it does not know.
        super().__init__(replace(load_config, model_loader_extra_config={}))
        self.load_config = load_config
        self._attached = AttachedRegion.of(load_config)
        self._arriving: Arriving = self._on_host  # vLLM may ask for weights again, when they are no longer loaded
        self._at: tuple[str, list[int]] | None = None  # the tensor that vLLM has been given last
        remove_names_of_collectives()

    def download_model(self, model_config: Any) -> None:
        self._attached.region.wait_index()

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        with self._attached.timeline.stage("skeleton"), avoid_cache_folder():
            model: nn.Module = super().create_model(vllm_config, model_config, prefix)
        self._attached.model = self._attached.model or model_config.model
        return model

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        if model_config.model != self._attached.model and Path(model_config.model).is_dir():  # a draft of its own
            with self._attached.timeline.stage("apply", model="draft"):
                _files_loader(self.load_config).load_weights(model, model_config)
            return
        with (
            self._attached.timeline.stage("apply") as detail,
            share_weights(model),
            arriving(self._attached, model, model_config) as found,
        ):
            if (
                model_config.enforce_eager and self._attached.kernels == "auto"
            ):  # torch.compile cannot trace our kernels
                detail["stored"] = use_stored_weights(model)
            self._arriving = found
            try:
                super().load_weights(model, model_config)
            except (AssertionError, RuntimeError, ValueError, IndexError) as error:
                if self._at is None or isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                    raise
                name, shape = self._at
                said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
                raise MismatchError(
                    f"vLLM cannot take the checkpoint's {name} of shape {shape}: {said}. Does its config.json belong "
                    "to it?"
                ) from error
            finally:
                self._arriving = self._on_host

    def track_weights_loading(
        self, model: nn.Module, loaded_weights: set[str] | None, *others: Any, **more: Any
    ) -> None:
        if loaded_weights is not None:
            warn_of_missing(model, loaded_weights)
        super().track_weights_loading(model, loaded_weights, *others, **more)

    def _on_host(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        return tensors(self._attached.region, names)

    def _get_weights_iterator(self, source: Any) -> Generator[tuple[str, Tensor], None, None]:
        if source.model_or_path != self._attached.model:
            raise ModelError(
                f"this model takes weights from a second checkpoint, {source.model_or_path}; expected a model whose "
                f"weights are all in one"
            )
        order = self._attached.region.wait_index().order
        unused = getattr(source, "is_unused_weight", None) or (lambda name: False)  # from 0.32 on
        layers = layers_of(self.load_config)
        names = [
            name
            for name in (order if layers is None else layers_first(order, *layers)[0])
            if not unused(name) and not should_skip_weight(name, self.local_expert_ids)
        ]
        for name, tensor in self._arriving(names):
            self._at = name, list(tensor.shape)
            yield source.prefix + name, tensor
        self._at = None


def _files_loader(load_config: Any) -> Any:
    """Return vLLM's loader for files on this machine."""
    return DefaultModelLoader(replace(load_config, load_format="auto", model_loader_extra_config={}))
