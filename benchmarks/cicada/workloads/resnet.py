"""ResNet with bottlenecks (He et al., 2016; the stride in the 3x3, as in v1.5), under torchvision's tensor names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

PLANS: dict[str, tuple[int, ...]] = {  # bottlenecks of each of the four layers
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which is a projection where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return cast(Tensor, self.relu(out))


class ResNet(nn.Module):
    """``forward``: images [batch, 3, height, width] → logits [batch, classes].

    ``plan`` is how many bottlenecks each layer has, ``width`` the channels inside those of the first one.
    """

    def __init__(self, plan: Sequence[int], *, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _layer(width, width, plan[0], 1)
        self.layer2 = _layer(width * 4, width * 2, plan[1], 2)
        self.layer3 = _layer(width * 8, width * 4, plan[2], 2)
        self.layer4 = _layer(width * 16, width * 8, plan[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width * 8 * EXPANSION, classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return cast(Tensor, self.fc(torch.flatten(self.avgpool(x), 1)))


def _layer(inputs: int, width: int, count: int, stride: int) -> nn.Sequential:
    first = Bottleneck(inputs, width, stride)
    return nn.Sequential(first, *(Bottleneck(width * EXPANSION, width) for _ in range(count - 1)))


def initialise(module: nn.Module) -> None:
    """Initial values for training, as torchvision gives them to the convolutions in ``module``."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


def resnet(name: str) -> ResNet:
    """``resnet50``, ``resnet101`` or ``resnet152`` for ImageNet; KeyError for another name."""
    return ResNet(PLANS[name])
