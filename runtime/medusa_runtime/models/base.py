"""What every family of decoders has: a configuration, and layers that run one by one over flat batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from medusa_runtime.load.applier import Applier
from medusa_runtime.load.skeleton import skeleton
from medusa_runtime.models.fields import Fields

if TYPE_CHECKING:
    from medusa_runtime.load.quantized.scheme import Quantization

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dtype_in(fields: Fields) -> torch.dtype:
    """The dtype that a config.json names; older ones call it ``torch_dtype``."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return DTYPES[fields.choice(name, DTYPES, default="float32")]


class Attention(Protocol):
    """Attention over the tokens of this step and those before; the engine owns the cache behind it.

    It may have an attribute ``lengths`` [tokens]: how long each token's sequence is after this step. Only dynamic rope
    scaling reads it.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] of the new tokens → like q.

        A token sees itself and earlier tokens of its sequence, the last ``window`` of them (itself included) if given.
        """
        ...


MOST_LAYERS = 10_000  # the skeleton of a million takes minutes


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What an engine must know about a model; each family adds what its layers need.

    ``windows`` has the sliding window of each layer, or None. A model is foreign when transformers has its code.
    """

    is_foreign: ClassVar[bool] = False

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

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        """The configuration of this family that ``fields`` describe; see ``registry.model_config``."""
        raise NotImplementedError

    def model(self) -> DecoderModel:
        """The model itself, in evaluation mode; its parameters have no memory yet (load/skeleton.py)."""
        from medusa_runtime.models.registry import family

        with skeleton():
            return family(self.architecture)(self).eval()

    @staticmethod
    def common(architecture: str, fields: Fields, *, tied: bool, kv_heads: int | None = None) -> dict[str, Any]:
        """The fields that all families share; ``tied`` and ``kv_heads`` are the family's defaults."""
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
        }


class DecoderModel(nn.Module):
    """A decoder-only transformer whose layers run in any range [start, stop), hidden states in and out.

    Batches are flat: the new tokens of all sequences one after another, without a batch dimension or padding. Its units
    (embedding, each layer, final norm, head) are always called as modules, so that a loader can gate them.
    """

    config_class: ClassVar[type[ModelConfig]]
    # The modules that ``embed`` uses. Those beside them and ``layers`` are the ones of ``logits``. A family that names
    # none cannot be split over several workers.
    entry: ClassVar[tuple[str, ...]] = ()
    config: ModelConfig
    layers: nn.ModuleList

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids and positions [tokens] → hidden states [tokens, hidden]."""
        raise NotImplementedError

    def run_layers(
        self, hidden: Tensor, positions: Tensor, attention: Attention, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """hidden [tokens, hidden] and positions [tokens] through the layers [start, stop) → [tokens, hidden]."""
        context = self.prepare(hidden, positions, attention)
        for layer in itertools.islice(self.layers, start, stop):
            hidden = layer(hidden, context, attention)
        return hidden

    def prepare(self, hidden: Tensor, positions: Tensor, attention: Attention) -> Any:
        """Return what all layers of a step share, such as the rope's cosines and sines; None if they share nothing."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] of the last layer → [rows, vocab], through the final norm and the head."""
        raise NotImplementedError

    def run(self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Tensor | None:
        """token_ids and positions [tokens] through the whole model; the logits [rows, vocab] of these rows, if any."""
        hidden = self.run_layers(self.embed(token_ids, positions), positions, attention)
        if rows is None:
            return None
        return self.logits(hidden if len(rows) == len(hidden) else hidden[rows])

    def rename(self, name: str) -> str | None:
        """The parameter that a checkpoint's tensor belongs to, or None for one that is not needed."""
        raise NotImplementedError

    def applier(self, dtype: torch.dtype) -> Applier:
        """Return what fills the model from a region, with floats of ``dtype``."""
        return Applier(self, dtype=dtype, quantization=self.config.quantization)
