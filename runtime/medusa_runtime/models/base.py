"""The parts that every family of decoders has: a configuration, and layers that run one by one over flat batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from medusa_runtime.checkpoint.divided import Divide
from medusa_runtime.errors import ConfigError, ModelError
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.skeleton import skeleton
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.sizes import MOST_LAYERS

if TYPE_CHECKING:
    from medusa_runtime.load.quantized.scheme import Quantization

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dtype_in(fields: Fields) -> torch.dtype:
    """Return the dtype that a config.json names, in ``dtype`` or, in older files, ``torch_dtype``."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return DTYPES[fields.choice(name, DTYPES, default="float32")]


def sees_later_tokens() -> ModelError:
    """Return the error for a decoder whose tokens see later ones, and which so continues no text."""
    return ModelError(
        "config.json: tokens of this model see later ones (is_causal is false, or use_bidirectional_attention), so it "
        "continues no text; expected another model, or a modules.json beside it, as models for embeddings have"
    )


class Attention(Protocol):
    """Attention over the tokens of this step and of earlier steps. The engine owns the cache behind it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """Compute the attention of the new tokens in one layer.

        q is [tokens, heads, head_dim], k and v are [tokens, kv_heads, head_dim], and the result has the shape of q.
        A token sees itself and the earlier tokens of its sequence. With ``window``, it sees only the last ``window`` of
        them, itself included.
        """
        ...


class StatefulAttention(Attention, Protocol):
    """An attention that also serves layers which keep a state of each sequence in place of keys and values."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the weighted sums of the last inputs of each channel (``kernels.recurrence.convolve``)."""
        ...

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None) -> Tensor:
        """Return what each token reads from the layer's matrices (``kernels.recurrence.recur``)."""
        ...


class StateShape(NamedTuple):
    """The sizes of what a layer keeps of each sequence, and its dtype: None for the model's own."""

    sizes: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The facts about a model that an engine needs. Each family adds what its layers need.

    ``windows`` has the sliding window of each layer in tokens, or None for a layer without one. ``is_foreign`` is true
    when the model runs with transformers' code, and ``has_experts`` when its tokens choose among parts of it.
    ``max_model_len`` is the longest sequence that the engine takes, or None for one of ``max_positions``. Tokens of a
    model that ``sees_later`` ones can be read, but not generated one by one. ``kv_layers`` are the layers that have
    keys and values; None: all. ``states`` has what each layer keeps of a sequence besides; it is empty if none does.
    """

    is_foreign: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tie_word_embeddings: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    quantization: Quantization | None = None
    max_model_len: int | None = None
    sees_later: bool = False
    kv_layers: tuple[int, ...] | None = None
    states: tuple[tuple[StateShape, ...], ...] = ()

    @property
    def attention_layers(self) -> Sequence[int]:
        """The numbers of the layers that have keys and values."""
        return range(self.num_layers) if self.kv_layers is None else self.kv_layers

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return how many bytes the states of a sequence take, with ``dtype`` as the model's own."""
        shapes = (shape for layer in self.states for shape in layer)
        return sum(math.prod(shape.sizes) * (shape.dtype or dtype).itemsize for shape in shapes)

    @property
    def longest(self) -> int:
        """The longest sequence that a start asks for, in tokens. Its KV cache may have room for less."""
        return self.max_model_len or self.max_positions

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        """Read this family's configuration from the fields of a config.json; see ``registry.model_config``."""
        raise NotImplementedError

    def check_generates(self) -> None:
        """Raise ModelError for a model whose tokens cannot be generated one by one."""
        if self.sees_later:
            raise sees_later_tokens()

    def model(self) -> DecoderModel:
        """Return the model as a skeleton in evaluation mode: its parameters have no memory yet (load/skeleton.py).

        Raises ConfigError for sizes with which torch cannot construct it.
        """
        try:
            with skeleton():
                return self.construct().eval()
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise ConfigError(f"config.json: expected sizes that a model can have, found: {text}") from error

    def construct(self) -> DecoderModel:
        """Construct this family's model."""
        raise NotImplementedError

    @staticmethod
    def common(architecture: str, fields: Fields, *, tied: bool, kv_heads: int | None = None) -> dict[str, Any]:
        """Read the fields that all families share, as arguments of the constructor.

        ``tied`` is the family's default for ``tie_word_embeddings``. ``kv_heads`` replaces ``num_key_value_heads`` for
        a family that has another key for it.
        """
        hidden = fields.count("hidden_size", "n_embed")
        heads = fields.count("num_attention_heads", "n_head")
        if fields.get("head_dim") is None and hidden % heads:
            raise fields.error("hidden_size", f"a multiple of the {heads} attention heads", hidden)
        kv_heads = kv_heads or fields.count("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of the {heads} attention heads", kv_heads)
        layers = fields.count("num_hidden_layers", "n_layer", most=MOST_LAYERS)
        return {
            "architecture": architecture,
            "vocab_size": fields.count("vocab_size"),
            "hidden_size": hidden,
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": fields.count("head_dim", default=hidden // heads),
            "max_positions": fields.count("max_position_embeddings", default=2048),
            "tie_word_embeddings": fields.flag("tie_word_embeddings", default=tied),
            "dtype": dtype_in(fields),
            "eos_token_ids": fields.ids("eos_token_id"),
            "windows": (None,) * layers,
            "quantization": fields.quantization(),
            "sees_later": fields.get("is_causal") is False,
        }


class DecoderModel(nn.Module):
    """A decoder-only transformer that can run any range [start, stop) of its layers.

    Batches are flat: the new tokens of all sequences one after another, without a batch dimension or padding. The
    embedding, each layer, the final norm and the head are always called as modules, so that a loader can put a gate on
    each of them.
    """

    config_class: ClassVar[type[ModelConfig]]
    # The modules that ``embed`` uses. All other modules except ``layers`` belong to ``logits``. A family without
    # them cannot be split over several workers.
    embedding_modules: ClassVar[tuple[str, ...]] = ()
    divide: Divide | None = None  # a method of families that take tensors in parts; see ``RegionTensors``
    config: ModelConfig
    layers: nn.ModuleList

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the hidden states [tokens, hidden] before the first layer from token_ids and positions [tokens]."""
        raise NotImplementedError

    def run_layers(
        self, hidden: Tensor, positions: Tensor, attention: Attention, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Run the layers [start, stop) on hidden [tokens, hidden] and positions [tokens]; return [tokens, hidden]."""
        context = self.prepare(hidden, positions, attention)
        for layer in itertools.islice(self.layers, start, stop):
            hidden = layer(hidden, context, attention)
        return hidden

    def prepare(self, hidden: Tensor, positions: Tensor, attention: Attention) -> Any:
        """Compute what all layers of a step share, such as the rope's cosines and sines; None if they share nothing."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """Run the final norm and the head on hidden [rows, hidden] of the last layer; return [rows, vocab]."""
        raise NotImplementedError

    def run(self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Tensor | None:
        """Run the whole model on token_ids and positions [tokens].

        Return the logits [rows, vocab] of the tokens at the indices ``rows``, or None when ``rows`` is None.
        """
        hidden = self.run_layers(self.embed(token_ids, positions), positions, attention)
        if rows is None:
            return None
        return self.logits(hidden if len(rows) == len(hidden) else hidden[rows])

    def rename(self, name: str) -> str | None:
        """Return the parameter for a checkpoint's tensor, or None for a tensor that the model does not need."""
        raise NotImplementedError

    def applier(self, dtype: torch.dtype) -> Applier:
        """Return the applier that fills the model from a region, with floats of ``dtype``."""
        return Applier(self, dtype=dtype, quantization=self.config.quantization, divide=self.divide)
