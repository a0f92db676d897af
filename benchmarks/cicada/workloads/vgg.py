"""VGG (Simonyan and Zisserman, 2015), under torchvision's tensor names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

PLANS: dict[str, tuple[int, ...]] = {  # convolutions of each of the five blocks
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}
WIDTHS = (1, 2, 4, 8, 8)  # of each block, in units of the first one's


class VGG(nn.Module):
    """Without batch norm. ``forward``: images [batch, 3, height, width] → logits [batch, classes].

    ``plan`` is how many convolutions each block has, ``width`` the channels of the first block, ``hidden`` the size of
    the two large layers.
    """

    def __init__(self, plan: Sequence[int], *, width: int = 64, hidden: int = 4096, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features(plan, width))
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(WIDTHS[-1] * width * 49, hidden), nn.ReLU(True), nn.Dropout(),
            nn.Linear(hidden, hidden), nn.ReLU(True), nn.Dropout(),
            nn.Linear(hidden, classes),
        )  # fmt: skip
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(torch.flatten(self.avgpool(self.features(images)), 1)))


def _features(plan: Sequence[int], width: int) -> Iterator[nn.Module]:
    channels = 3
    for count, factor in zip(plan, WIDTHS, strict=True):
        for _ in range(count):
            yield nn.Conv2d(channels, factor * width, kernel_size=3, padding=1)
            yield nn.ReLU(True)
            channels = factor * width
        yield nn.MaxPool2d(2, 2)


def initialise(module: nn.Module) -> None:
    """Initial values for training, as torchvision gives them to whatever layers are in ``module``."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, 0, 0.01)
        else:
            continue
        if part.bias is not None:
            nn.init.zeros_(part.bias)


def vgg(name: str) -> VGG:
    """``vgg11``, ``vgg13``, ``vgg16`` or ``vgg19`` for ImageNet; KeyError for another name."""
    return VGG(PLANS[name])
