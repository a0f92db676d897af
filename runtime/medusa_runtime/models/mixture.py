"""Mixtures of experts: Mixtral, Qwen2-MoE and Qwen3-MoE, which are Llamas apart from what follows the attention.

Each expert is a unit that is loaded by itself, and used where its weights lie. So the first forward waits only for the
experts that its tokens are routed to, and has these fetched before the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_runtime.checkpoint.divided import rows
from medusa_runtime.checkpoint.index import TensorEntry
from medusa_runtime.errors import MismatchError
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.linear import Linear
from medusa_runtime.models.llama import GatedMLP, Llama, LlamaConfig, with_defaults
from medusa_runtime.models.sizes import MOST_EXPERTS

_MIXTRAL = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(LlamaConfig):
    """``sparse`` says which layers have experts. ``shared_size`` is the width of an expert for all tokens, or 0.

    The probabilities of the ``chosen`` experts of a token are scaled to the sum 1 if they are ``normalized``.
    """

    has_experts: ClassVar[bool] = True

    experts: int
    chosen: int
    expert_size: int
    normalized: bool
    shared_size: int
    sparse: tuple[bool, ...]

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        fields = with_defaults(architecture, fields)
        llama = LlamaConfig.read(architecture, fields)
        if architecture != "MixtralForCausalLM":
            sparse = cls.sparse_layers(fields, llama.num_layers)
            return cls(**vars(llama), **cls.mixture(llama.num_layers, fields, sparse, shared="Qwen2" in architecture))
        same = Fields(
            {**fields.raw, "moe_intermediate_size": llama.intermediate_size, "norm_topk_prob": True}, fields.where
        )
        return cls(**vars(llama), **cls.mixture(llama.num_layers, same, [True] * llama.num_layers))

    @staticmethod
    def mixture(layers: int, fields: Fields, sparse: Sequence[bool], *, shared: bool = False) -> dict[str, Any]:
        """Read what a mixture has beside a Llama, as arguments of the constructor; ``shared``: an expert for all."""
        experts = fields.count("num_experts", "num_local_experts", most=MOST_EXPERTS // layers)
        chosen = fields.count("num_experts_per_tok")
        if chosen > experts:
            raise fields.error("num_experts_per_tok", f"at most the number of experts, {experts}", chosen)
        return {
            "experts": experts,
            "chosen": chosen,
            "expert_size": fields.count("moe_intermediate_size"),
            "normalized": fields.flag("norm_topk_prob", default=False),
            "shared_size": fields.index("shared_expert_intermediate_size", default=0) if shared else 0,
            "sparse": tuple(sparse),
        }

    @staticmethod
    def sparse_layers(fields: Fields, layers: int) -> list[bool]:
        """Return which layers have experts: every one, or each at a certain step, but for those that are named."""
        step = fields.count("decoder_sparse_step", default=1)
        dense = fields.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(one) is int for one in dense):
            raise fields.error("mlp_only_layers", "a list of layers' numbers", dense)
        return [at not in dense and (at + 1) % step == 0 for at in range(layers)]

    def construct(self) -> Llama:
        return Mixture(self)

    def mlp(self, index: int) -> nn.Module:
        return Experts(self) if self.sparse[index] else super().mlp(index)


def combined(experts: Sequence[Any] | nn.ModuleList, normed: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    """Return the sum of the outputs of each token's experts for ``normed`` [tokens, hidden].

    ``chosen`` [tokens, count] are the numbers of the experts, and ``shares`` how much each counts.
    """
    out = torch.zeros_like(normed)
    order = chosen.flatten().argsort(stable=True)  # the pairs of a token and an expert, expert by expert
    rows, weights = order // chosen.shape[1], shares.flatten()[order].unsqueeze(-1)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
    begin = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            pairs = slice(begin, begin + count)
            part = expert(normed[rows[pairs]]) * weights[pairs]
            out.index_add_(0, rows[pairs], part.to(out.dtype))
            begin += count
    return out


class Routed(nn.Module):
    """Perceptrons of which each token uses a few (Shazeer et al., 2017; Fedus et al., 2022)."""

    experts: nn.ModuleList

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, normed: Tensor, hidden: Tensor) -> Tensor:
        """Return ``hidden`` plus the experts' output for ``normed`` [tokens, hidden]."""
        return hidden + self.combined(normed)

    def combined(self, normed: Tensor) -> Tensor:
        """Return the sum of the outputs of each token's experts, each as far as it counts."""
        shares, chosen = self.route(normed)
        return combined(self.experts, normed, shares, chosen)

    def route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token [tokens, chosen], and before them how much each counts."""
        raise NotImplementedError


class Experts(Routed):
    """The experts of a layer, and perhaps one for all tokens."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config.chosen)
        self.normalized = config.normalized
        self.rounds = config.architecture != "MixtralForCausalLM"  # probabilities to the dtype of the hidden states
        self.gate = Linear(config.hidden_size, config.experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(config, config.expert_size) for _ in range(config.experts))
        self.has_shared = config.shared_size > 0
        if self.has_shared:
            self.shared_expert = GatedMLP(config, config.shared_size)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def combined(self, normed: Tensor) -> Tensor:
        out = super().combined(normed)
        if self.has_shared:
            out = out + F.sigmoid(self.shared_expert_gate(normed)) * self.shared_expert(normed)
        return out

    def route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = F.softmax(self.gate(normed), -1, dtype=torch.float32)
        shares, chosen = torch.topk(probabilities, self.chosen, -1)
        if self.normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares.to(normed.dtype) if self.rounds else shares, chosen


def expert_parts(name: str, entry: TensorEntry, config: MixtureConfig) -> Mapping[str, TensorEntry] | None:
    """Return the parts of a tensor that has the weights of all experts of a layer; None for another tensor.

    It is [experts, out, in], or [experts, in, out] as in Qwen3-VL's mixtures. Raises MismatchError for another shape.
    """
    layer, found, kind = name.rpartition(".mlp.experts.")
    if not found or kind not in ("gate_up_proj", "down_proj"):
        return None
    count, size, hidden = config.experts, config.expert_size, config.hidden_size
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    out, inner = (size, hidden) if kind == "gate_up_proj" else (hidden, size)
    width = out * len(kinds)
    if entry.shape not in ((count, width, inner), (count, inner, width)) or entry.strides is not None:
        raise MismatchError(f"{name}: expected {[count, width, inner]}, found {list(entry.shape)}")
    wholes = rows(entry, [f"{layer}.mlp.experts.{expert}" for expert in range(count)])
    parts: dict[str, TensorEntry] = {}
    for expert, whole in wholes.items():
        names = [f"{expert}.{one}.weight" for one in kinds]
        if entry.shape[1] == width:
            parts |= rows(whole._replace(shape=(len(kinds), out, inner)), names)
            continue
        item = (whole.stop - whole.start) // (width * inner)  # the bytes of a number
        left = (len(kinds) - 1) * out * item  # the bytes of the other part in a row
        for at, part in enumerate(names):
            start = whole.start + at * out * item
            stop = whole.stop - left + at * out * item
            parts[part] = whole._replace(start=start, stop=stop, shape=(out, inner), strides=(1, width))
    return parts


class Mixture(Llama):
    config: MixtureConfig
    config_class = MixtureConfig

    def divide(self, name: str, entry: TensorEntry) -> Mapping[str, TensorEntry] | None:
        """Return the parts of a tensor that has the weights of all experts of a layer."""
        return expert_parts(name, entry, self.config)

    def rename(self, name: str) -> str | None:
        found = super().rename(name)
        if found is None or ".block_sparse_moe." not in found:
            return found
        return ".".join(_MIXTRAL.get(part, part) for part in found.split("."))


__all__ = ["Experts", "Mixture", "MixtureConfig", "Routed", "combined", "expert_parts"]
