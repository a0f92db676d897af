"""ResNet against transformers' ResNetForImageClassification, whose names differ from torchvision's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from medusa_runtime.load.skeleton import skeleton
from safetensors.torch import save_file
from torch import nn

from benchmarks.cicada.workloads.resnet import PLANS, ResNet, resnet

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

PLAN, WIDTH, CLASSES = (2, 1, 2, 1), 8, 11


def torchvision_name(name: str) -> str:
    """resnet.encoder.stages.0.layers.1.layer.2.convolution.weight → layer1.1.conv3.weight, and so on."""
    name = re.sub(r"^resnet\.embedder\.embedder\.", "stem.", name)
    name = re.sub(r"^resnet\.encoder\.stages\.(\d+)\.layers\.(\d+)\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.", name)
    name = re.sub(r"shortcut\.(convolution|normalization)", lambda m: f"downsample.{int(m[1][0] == 'n')}", name)
    name = re.sub(r"layer\.(\d)\.convolution", lambda m: f"conv{int(m[1]) + 1}", name)
    name = re.sub(r"layer\.(\d)\.normalization", lambda m: f"bn{int(m[1]) + 1}", name)
    name = name.replace("stem.convolution", "conv1").replace("stem.normalization", "bn1")
    return name.replace("classifier.1.", "fc.")


def test_agrees_with_transformers(tmp_path: Path, filled: Callable[..., nn.Module]) -> None:
    sizes = [WIDTH * 4 * 2**i for i in range(4)]
    config = transformers.ResNetConfig(
        embedding_size=WIDTH, hidden_sizes=sizes, depths=list(PLAN), layer_type="bottleneck", num_labels=CLASSES
    )
    torch.manual_seed(0)
    theirs = transformers.ResNetForImageClassification(config).eval()
    state = theirs.state_dict()
    for name, tensor in state.items():  # running statistics too, or nobody would notice that they are not loaded
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5 if "normalization" in name else torch.randn_like(tensor) * 0.1)
    save_file({torchvision_name(name): tensor for name, tensor in state.items()}, tmp_path / "model.safetensors")
    ours = filled(tmp_path, lambda: ResNet(PLAN, width=WIDTH, classes=CLASSES))
    images = torch.randn(2, 3, 64, 64)
    expected = theirs(images).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "millions", "tensors"), [("resnet50", 25.557, 320), ("resnet101", 44.549, 626), ("resnet152", 60.193, 932)]
)
def test_the_shapes_are_those_of_imagenet(name: str, millions: float, tensors: int) -> None:
    """Parameter counts as torchvision documents them."""
    with skeleton():
        model = resnet(name)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 3) == millions
    assert len(model.state_dict()) == tensors
    assert model.layer2[0].conv2.stride == (2, 2)
    assert set(PLANS) == {"resnet50", "resnet101", "resnet152"}
