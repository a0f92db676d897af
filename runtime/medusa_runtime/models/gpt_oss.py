"""GPT-OSS: a mixture of experts whose attention has sinks, and whose experts lie in a few tensors of a layer.

Checkpoints have one tensor for the weights of all experts of a layer. Each expert's part of it is a unit that is loaded
by itself, and used where it lies. So as with other mixtures, the first forward waits only for the experts that its
tokens are routed to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_runtime.checkpoint.divided import rows
from medusa_runtime.checkpoint.index import TensorEntry
from medusa_runtime.errors import MismatchError
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.linear import Linear
from medusa_runtime.models.llama import Llama, LlamaConfig, SelfAttention, layer_windows, with_defaults
from medusa_runtime.models.mixture import Routed
from medusa_runtime.models.sizes import MOST_EXPERTS

_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_BLOCK, _BLOCK_BYTES = 32, 16  # values of MXFP4 that share a scale, and their bytes
_PARTS = {"": "weight", "_blocks": "blocks", "_scales": "scales", "_bias": "bias"}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(LlamaConfig):
    """``alpha`` and ``limit`` are those of the experts' gates."""

    has_experts: ClassVar[bool] = True
    norm_once: ClassVar[bool] = True

    experts: int
    chosen: int
    alpha: float
    limit: float

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        fields = with_defaults(architecture, fields)
        if not (fields.get("rope_parameters") or fields.get("rope_scaling")):
            fields = Fields({**fields.raw, "rope_scaling": _ROPE}, fields.where)
        llama = LlamaConfig.read(architecture, fields)
        experts = fields.count("num_local_experts", "num_experts", most=MOST_EXPERTS // llama.num_layers)
        chosen = fields.count("num_experts_per_tok", "experts_per_token", default=4)
        if chosen > experts:
            raise fields.error("num_experts_per_tok", f"at most the number of experts, {experts}", chosen)
        return cls(
            **vars(llama) | {"windows": layer_windows(fields, [layer % 2 == 0 for layer in range(llama.num_layers)])},
            experts=experts,
            chosen=chosen,
            alpha=fields.number("swiglu_alpha", default=1.702),
            limit=fields.positive("swiglu_limit", default=7.0),
        )

    def construct(self) -> GptOss:
        return GptOss(self)

    def attention(self, index: int) -> SelfAttention:
        return SinkAttention(self, index)

    def mlp(self, index: int) -> nn.Module:
        return GptOssExperts(self)


class SinkAttention(SelfAttention):
    """Attention in which each head has a sink: the score of a further position, which has no value."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        self.sinks = nn.Parameter(torch.empty(config.num_heads))

    def attend(self, attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"scale": self.scale, "window": self.window, "sinks": self.sinks}  # only attention on CPUs has sinks
        return cast(Tensor, attention.attend(self.index, q, k, v, **options))


class GptOssExpert(nn.Module):
    """A perceptron whose gates and inputs are the even and the odd results of one projection."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)
        self.alpha, self.limit = config.alpha, config.limit

    def forward(self, normed: Tensor) -> Tensor:
        both = self.gate_up_proj(normed)
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        return cast(Tensor, self.down_proj((up + 1) * (gate * torch.sigmoid(gate * self.alpha))))


class GptOssExperts(Routed):
    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config.chosen)
        self.router = Linear(config.hidden_size, config.experts)
        self.experts = nn.ModuleList(GptOssExpert(config) for _ in range(config.experts))

    def route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = torch.topk(self.router(normed), self.chosen, -1)
        return F.softmax(scores, -1), chosen


class GptOss(Llama):
    config: GptOssConfig
    config_class = GptOssConfig

    def divide(self, name: str, entry: TensorEntry) -> Mapping[str, TensorEntry] | None:
        """Return the parts of a tensor that has the weights, scales or biases of all experts of a layer."""
        layer, found, kind = name.rpartition(".mlp.experts.")
        projection = next((one for one in ("gate_up_proj", "down_proj") if kind.startswith(one)), "")
        part = _PARTS.get(kind.removeprefix(projection)) if projection else None
        if not found or part is None:
            return None
        config = self.config
        outputs, inputs = config.hidden_size, config.intermediate_size
        if projection == "gate_up_proj":
            outputs, inputs = 2 * config.intermediate_size, config.hidden_size
        shapes = {
            "weight": (inputs, outputs),
            "blocks": (outputs, inputs // _BLOCK, _BLOCK_BYTES),
            "scales": (outputs, inputs // _BLOCK),
            "bias": (outputs,),
        }
        expected = (config.experts, *shapes[part])
        if entry.shape != expected or entry.strides is not None:
            other = "" if entry.strides is None else f" with strides {list(entry.strides)}"
            raise MismatchError(f"{name}: expected {list(expected)}, found {list(entry.shape)}{other}")
        names = [f"{layer}.mlp.experts.{expert}.{projection}.{part}" for expert in range(config.experts)]
        parts = rows(entry, names)
        if part != "weight":
            return parts
        # Weights that are not quantized are stored as [in, out].
        return {name: one._replace(shape=(outputs, inputs), strides=(1, outputs)) for name, one in parts.items()}


__all__ = ["GptOss", "GptOssConfig"]
