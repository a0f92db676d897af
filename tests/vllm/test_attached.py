"""The region that vLLM's loaders find by its path."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from medusa_runtime.config import Settings
from medusa_runtime.errors import ModelError
from medusa_runtime.timeline import Timeline
from vllm_installed import vllm_is_installed

if not vllm_is_installed():
    pytest.skip("vLLM is not installed", allow_module_level=True)

from medusa_vllm.weights.attached import AttachedRegion, loader_config
from medusa_vllm.weights.loader import RegionLoader
from vllm.config import LoadConfig

pytestmark = pytest.mark.vllm


def config(filled: Any) -> Any:
    extra = loader_config(filled.region, Timeline.create("test"), Settings())
    return LoadConfig(load_format="medusa", model_loader_extra_config=extra)


def test_a_descriptor_that_is_used_again_is_another_region(filling: Callable[..., Any]) -> None:
    found, timeline = [], Timeline.create("test")
    for value in (1.0, 2.0):
        filled = filling({"layers.0.w": torch.full((4, 4), value)}).complete()
        extra: Any = SimpleNamespace(model_loader_extra_config=loader_config(filled.region, timeline, Settings()))
        region = AttachedRegion.of(extra).region
        found.append((filled.region.fd, bytes(region.shard(0)[:4])))
        filled.close()
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_a_new_loader_reloads_the_weights_of_the_same_model_alone(filling: Callable[..., Any]) -> None:
    """vLLM makes another loader to load weights again."""
    load = config(filling({"layers.0.w": torch.ones(4, 4)}).complete())
    AttachedRegion.of(load).model = "/m"  # as the first loader has said
    model: Any = SimpleNamespace()
    (weight,) = RegionLoader(load).get_all_weights(SimpleNamespace(model="/m", revision=None), model)
    assert weight[0] == "layers.0.w"
    with pytest.raises(ModelError, match="a second checkpoint, /other"):
        list(RegionLoader(load).get_all_weights(SimpleNamespace(model="/other", revision=None), model))
