"""VGG against the same layers written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from medusa_runtime.load.skeleton import skeleton
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.cicada.workloads.vgg import PLANS, VGG, vgg

# torchvision's indices of the convolutions in ``features``; a pooling follows where the next index is 3 away.
CONVOLUTIONS = {
    "vgg11": (0, 3, 6, 8, 11, 13, 16, 18),
    "vgg13": (0, 2, 5, 7, 10, 12, 15, 17, 20, 22),
    "vgg16": (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28),
    "vgg19": (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34),
}


def by_hand(state: dict[str, Tensor], images: Tensor, places: tuple[int, ...]) -> Tensor:
    x = images
    for place, following in zip(places, (*places[1:], places[-1] + 3), strict=True):
        x = F.conv2d(x, state[f"features.{place}.weight"], state[f"features.{place}.bias"], padding=1).relu()
        if following - place == 3:
            x = F.max_pool2d(x, 2)
    x = F.adaptive_avg_pool2d(x, (7, 7)).flatten(1)
    for place in (0, 3, 6):
        x = x if place == 0 else x.relu()
        x = F.linear(x, state[f"classifier.{place}.weight"], state[f"classifier.{place}.bias"])
    return x


@pytest.mark.parametrize("name", PLANS)
def test_agrees_with_the_layers_by_hand(name: str, tmp_path: Path, filled: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)

    def make() -> VGG:
        return VGG(PLANS[name], width=4, hidden=32, classes=9)

    state = {key: torch.randn_like(value) * 0.15 for key, value in make().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    images = torch.randn(2, 3, 32, 64)
    expected = by_hand(state, images, CONVOLUTIONS[name])
    assert expected.std() > 0.1
    torch.testing.assert_close(filled(tmp_path, make)(images), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "millions"), [("vgg11", 132.863), ("vgg16", 138.358), ("vgg19", 143.667)])
def test_the_shapes_are_those_of_imagenet(name: str, millions: float) -> None:
    """Parameter counts as torchvision documents them."""
    with skeleton():
        model = vgg(name)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 3) == millions
    assert tuple(model.classifier[0].weight.shape) == (4096, 25088)
