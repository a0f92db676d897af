"""The models that the torch engine reads from GGUF files: transformers' names for them and for their tensors.

Source: the tensor names of llama.cpp's ``gguf-py`` and what its converter changes in a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import CorruptError, ModelError, short_repr
from ..divided import rows
from ..header import MOST_TENSORS, HeaderEntry
from ..index import TensorEntry
from .metadata import Metadata

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# Numbers that divide rotary frequencies, and transformers' names for them. Llama 3 has one list for all lengths.
ROPE_FACTORS = {
    "rope_freqs.weight": ("short_factor", "long_factor"),
    "rope_factors_short.weight": ("short_factor",),
    "rope_factors_long.weight": ("long_factor",),
}
_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+?)(?:\.(\d{1,6}))?\.(weight|bias)")
_VECTORS = ("ffn_gate_inp_shexp",)  # stored with one dimension, and with two in transformers


class Architecture(NamedTuple):
    """A model of llama.cpp as transformers has it.

    name: transformers' class.
    layer: the names of a layer's modules. ``{}`` stands for an expert's number.
    has_rotary_pairs: whether the rows of q and k are stored in pairs that are rotated together; transformers has the
        first elements of all pairs of a head in front of the second ones.
    norm_shift: how much is added to the weights of norms.
    """

    name: str
    model_type: str
    layer: Mapping[str, str]
    has_rotary_pairs: bool = False
    norm_shift: float = 0.0

    def entries(self, stored: Mapping[str, HeaderEntry]) -> dict[str, TensorEntry]:
        """Return the tensors by transformers' names, each expert's by itself. Other names stay as they are."""
        found: dict[str, TensorEntry] = {}
        for name, entry in stored.items():
            tensor = TensorEntry(0, *entry)
            for other, part in self._renamed(name, tensor).items():
                if other in found:
                    raise CorruptError(f"expected one tensor for {other}, found {short_repr(name)} and another one")
                found[other] = part
        return found

    def _renamed(self, name: str, entry: TensorEntry) -> Mapping[str, TensorEntry]:
        parts = _NAME.fullmatch(name)
        if parts is None:
            stem, _, end = name.rpartition(".")
            return {f"{_GLOBAL[stem]}.{end}" if stem in _GLOBAL else name: entry}
        layer, stem, expert, end = parts.groups()
        module = self.layer.get(stem if expert is None else f"{stem}_exps")
        if module is None:
            return {name: entry}
        prefix = f"model.layers.{layer}."
        if stem in _VECTORS and len(entry.shape) == 1:
            entry = entry._replace(shape=(1, *entry.shape))
        if "{}" not in module:
            return {f"{prefix}{module}.{end}": entry}
        if expert is not None:  # files of 2023 and early 2024
            return {f"{prefix}{module.format(int(expert))}.{end}": entry}
        if len(entry.shape) < 2 or entry.shape[0] > MOST_TENSORS:
            raise CorruptError(
                f"{short_repr(name)}: expected the weights of up to {MOST_TENSORS} experts, found {list(entry.shape)}"
            )
        return rows(entry, (f"{prefix}{module.format(number)}.{end}" for number in range(entry.shape[0])))


def architecture(metadata: Metadata) -> Architecture:
    """Return the architecture of a file. Raises ModelError for one that is not read from GGUF files."""
    kind = metadata.architecture
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{metadata.name}: the torch engine does not read models of architecture {short_repr(kind)} from GGUF "
            f"files; expected one of {', '.join(ARCHITECTURES)}, or the model as safetensors"
        )
    found = ARCHITECTURES[kind]
    if kind == "llama" and metadata.has("expert_count"):
        return found._replace(name="MixtralForCausalLM", model_type="mixtral", layer=_LAYER | _MIXTRAL)
    if kind == "llama" and metadata.has("attention.sliding_window"):
        return found._replace(name="MistralForCausalLM", model_type="mistral")
    return found


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", _LAYER, has_rotary_pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _LAYER),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", _LAYER | _QWEN_EXPERTS),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _LAYER),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _LAYER | _QWEN_EXPERTS),
    "gemma": Architecture("GemmaForCausalLM", "gemma", _LAYER, norm_shift=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _LAYER | _GEMMA, norm_shift=1.0),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _LAYER | _PHI3),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _LAYER, has_rotary_pairs=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _LAYER | _GEMMA, norm_shift=1.0),
}

__all__ = ["ARCHITECTURES", "ROPE_FACTORS", "Architecture", "architecture"]
