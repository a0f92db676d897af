"""What is run: a model as a whole, and the same model as layers that can be constructed, loaded and run one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from medusa_runtime.models.bert import Bert, BertConfig, BertLayer, Dense, Embeddings
from medusa_runtime.models.layers.whole import WholeAttention
from medusa_runtime.models.registry import family, model_config
from torch import Tensor, nn

from benchmarks.cicada.workloads import resnet, vgg
from benchmarks.shapes import SHAPES, Shape

IMAGE = 224
TOKENS = {"llama": 128, "opt": 10, "bert": 128}  # the first two as in Cicada §4.2


@dataclass(frozen=True)
class Step:
    """One layer: its name in the whole model, how it is constructed, and how it is run on what came before."""

    name: str
    make: Callable[[], nn.Module]
    run: Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Workload:
    """A model and its input. ``forward`` on the whole and ``steps`` one after the other give the same, bit for bit."""

    name: str
    factory: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    forward: Callable[[Any, Any], Tensor]
    steps: tuple[Step, ...]
    dtype: torch.dtype = torch.float32
    rename: Callable[[str], str | None] = lambda name: name  # checkpoint's name → model's
    shape: Shape | None = None  # of a decoder, whose checkpoint make_checkpoint writes


def workload(name: str) -> Workload:
    """Raises KeyError for a name that is not in NAMES."""
    if name in _VGG:
        return _vgg(name, **_VGG[name])
    if name in _RESNET:
        return _resnet(name, **_RESNET[name])
    if name in _BERT:
        return _bert(name, _BERT[name])
    return _decoder(name, SHAPES[name])


_VGG: dict[str, dict[str, Any]] = {name: {"plan": plan} for name, plan in vgg.PLANS.items()}
_VGG["tiny-vgg"] = {"plan": (1, 1, 1, 1, 1), "width": 4, "hidden": 32}
_RESNET: dict[str, dict[str, Any]] = {name: {"plan": plan} for name, plan in resnet.PLANS.items()}
_RESNET["tiny-resnet"] = {"plan": (1, 2, 1, 1), "width": 4}
_BERT = {
    "bert-base": BertConfig(
        vocab_size=30522, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072, max_positions=512
    ),
    "bert-large": BertConfig(
        vocab_size=30522, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096, max_positions=512
    ),
    "tiny-bert": BertConfig(
        vocab_size=99, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_positions=128
    ),
}
NAMES = (*_VGG, *_RESNET, *_BERT, *(name for name, shape in SHAPES.items() if shape.family in ("llama", "opt")))


def _image() -> Tensor:
    return torch.randn(1, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(0))


def _call(module: Any, x: Any) -> Any:
    return module(x)


def _made(initialise: Callable[[nn.Module], None], kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Any:
    module = kind(*args, **options)
    initialise(module)
    return module


def _vgg(name: str, plan: tuple[int, ...], width: int = 64, hidden: int = 4096) -> Workload:
    def steps() -> Iterator[Step]:
        channels, place = 3, 0
        for count, factor in zip(plan, vgg.WIDTHS, strict=True):
            for number in range(count):
                make = partial(_made, vgg.initialise, nn.Conv2d, channels, factor * width, 3, padding=1)
                last = number == count - 1
                run: Callable[[Any, Any], Any] = lambda module, x: module(x).relu_()  # noqa: E731
                pooled: Callable[[Any, Any], Any] = lambda module, x: F.max_pool2d(module(x).relu_(), 2, 2)  # noqa: E731
                yield Step(f"features.{place}", make, pooled if last else run)
                channels, place = factor * width, place + 3 if last else place + 2
        linear = partial(_made, vgg.initialise, nn.Linear)
        yield Step(
            "classifier.0",
            partial(linear, channels * 49, hidden),
            lambda module, x: module(torch.flatten(F.adaptive_avg_pool2d(x, (7, 7)), 1)).relu_(),
        )
        yield Step("classifier.3", partial(linear, hidden, hidden), lambda module, x: module(x).relu_())
        yield Step("classifier.6", partial(linear, hidden, 1000), _call)

    factory = partial(vgg.VGG, plan, width=width, hidden=hidden)
    return Workload(name, factory, _image, _call, tuple(steps()))


def _resnet(name: str, plan: tuple[int, ...], width: int = 64) -> Workload:
    def steps() -> Iterator[Step]:
        conv = partial(nn.Conv2d, 3, width, 7, stride=2, padding=3, bias=False)
        yield Step("conv1", partial(_made, resnet.initialise, conv), _call)
        yield Step("bn1", partial(nn.BatchNorm2d, width), lambda module, x: F.max_pool2d(module(x).relu_(), 3, 2, 1))
        inputs = width
        for layer, count in enumerate(plan):
            inner = width << layer
            for number in range(count):
                stride = 2 if layer and not number else 1
                make = partial(_made, resnet.initialise, resnet.Bottleneck, inputs, inner, stride)
                yield Step(f"layer{layer + 1}.{number}", make, _call)
                inputs = inner * resnet.EXPANSION
        yield Step(
            "fc",
            partial(nn.Linear, inputs, 1000),
            lambda module, x: module(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1)),
        )

    return Workload(name, partial(resnet.ResNet, plan, width=width), _image, _call, tuple(steps()))


def _bert(name: str, config: BertConfig) -> Workload:
    def inputs() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, config.vocab_size, (1, TOKENS["bert"]), generator=generator)

    def steps() -> Iterator[Step]:
        yield Step("embeddings", partial(Embeddings, config), lambda module, ids: module(ids, torch.zeros_like(ids)))
        for number in range(config.num_layers):
            yield Step(
                f"encoder.layer.{number}", partial(BertLayer, config), lambda module, hidden: module(hidden, None)
            )
        pooler = partial(Dense, config.hidden_size, config.hidden_size)
        yield Step("pooler", pooler, lambda module, hidden: torch.tanh(module(hidden[:, 0])))

    return Workload(name, partial(Bert, config), inputs, lambda model, ids: model.pooled(model(ids)), tuple(steps()))


def _decoder(name: str, shape: Shape) -> Workload:
    """Llama or OPT, tied or not, up to the logits of the next token."""
    config = model_config({**shape.config(), "dtype": "bfloat16"})
    kind: Any = family(config.architecture)
    # Layers are taken from a model of one layer that is never run: it also has the rope, which no step constructs.
    from medusa_runtime.load.skeleton import skeleton

    with skeleton():
        frame = kind(config)
    layer_kind: Any = type(frame.layers[0])
    parts = dict(frame.named_children())
    count = TOKENS[shape.family]

    def inputs() -> Tensor:
        return (
            torch.randint(0, 1000 if shape.family == "opt" else 32000, (count,), generator=_seeded()) % shape.vocabulary
        )

    def forward(model: Any, ids: Tensor) -> Tensor:
        positions = torch.arange(count)
        hidden = model.run_layers(model.embed(ids, positions), positions, WholeAttention())
        return torch.as_tensor(model.logits(hidden[-1:]))

    def embed(module: nn.Module, ids: Tensor) -> Any:
        positions, attention = torch.arange(count), WholeAttention()
        hidden = module(ids)
        context = frame.prepare(hidden, positions, attention)
        return SimpleNamespace(hidden=hidden, positions=positions, attention=attention, context=context, tied=module)

    def steps() -> Iterator[Step]:
        yield Step("embed_tokens", partial(nn.Embedding, config.vocab_size, parts["embed_tokens"].embedding_dim), embed)
        if "embed_positions" in parts:
            table = parts["embed_positions"]
            yield Step("embed_positions", partial(nn.Embedding, table.num_embeddings, table.embedding_dim), _positions)
        for number in range(config.num_layers):
            yield Step(f"layers.{number}", partial(layer_kind, config, number), _layer)
        norm = "norm" if "norm" in parts else "final_layer_norm"
        yield Step(norm, partial(_norm, parts[norm]), _last)
        make = nn.Identity if config.tie_word_embeddings else partial(_head, parts["lm_head"])
        yield Step("lm_head", make, partial(_logits, parts["lm_head"].forward.__func__))

    return Workload(name, partial(kind, config), inputs, forward, tuple(steps()), torch.bfloat16, frame.rename, shape)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _positions(module: nn.Module, state: Any) -> Any:
    from medusa_runtime.models.opt import POSITION_OFFSET

    state.hidden = state.hidden + module(state.positions + POSITION_OFFSET)
    return state


def _layer(module: nn.Module, state: Any) -> Any:
    state.hidden = module(state.hidden, state.context, state.attention)
    return state


def _last(module: nn.Module, state: Any) -> Any:
    state.hidden = module(state.hidden[-1:])
    return state


def _norm(like: Any) -> nn.Module:
    if isinstance(like, nn.LayerNorm):
        return nn.LayerNorm(like.normalized_shape, eps=like.eps)
    made: nn.Module = type(like)(like.weight.shape[0], like.eps)
    return made


def _head(like: nn.Linear) -> nn.Module:
    return type(like)(like.in_features, like.out_features, bias=False)


def _logits(forward: Callable[..., Tensor], module: nn.Module, state: Any) -> Tensor:
    """The head, with the embedding's matrix where they are tied."""
    if isinstance(module, nn.Identity):
        module = SimpleNamespace(weight=state.tied.weight, bias=None, adapted=None)  # type: ignore[assignment]
    return forward(module, state.hidden)
