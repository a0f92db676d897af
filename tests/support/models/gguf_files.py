"""Checkpoints of transformers as GGUF files, converted as llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

KINDS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip
_GEMMA = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def write_gguf(
    checkpoint: Path, out: Path, kind: str = "F32", *, parts: int = 1, merged: bool = True, **metadata: Any
) -> Path:
    """Write the checkpoint in a folder as ``out``, or as ``parts`` files of which the first is returned.

    ``kind`` is the type of matrices. With ``merged=False`` each expert has tensors of its own, as in old files.
    ``metadata`` has further keys, with a double underscore in place of each dot, or None to leave one out.
    """
    config = json.loads((checkpoint / "config.json").read_bytes())
    arch = KINDS[config["architectures"][0]]
    stored: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        stored |= load_file(file)
    tensors = _converted(stored, config, arch, merged)
    names = [list(tensors)[at::parts] for at in range(parts)]
    names_of_parts = [f"{out.stem}-{at:05}-of-{parts:05}.gguf" for at in range(1, parts + 1)]
    files = [out.with_name(name) for name in names_of_parts] if parts > 1 else [out]
    for number, (file, chosen) in enumerate(zip(files, names, strict=True)):
        writer = GGUFWriter(file, arch)
        if number == 0:
            given = {key.replace("__", "."): value for key, value in metadata.items()}
            for key, value in (_metadata(config, arch) | given).items():
                _add(writer, key, value)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
        for name in chosen:
            _add_tensor(writer, name, tensors[name], kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files[0]


def _metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    keys = {
        "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }  # fmt: skip
    found = {f"{arch}.{key}": config[name] for key, name in keys.items() if config.get(name) is not None}
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        found[f"{arch}.expert_count"] = experts
    rope = config.get("rope_parameters") or {}
    rope, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    found[f"{arch}.rope.freq_base"] = rope["rope_theta"]
    if local is not None:
        found[f"{arch}.rope.freq_base_swa"] = local["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        found[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        found[f"{arch}.rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] in ("yarn", "longrope"):
        found[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if (part := rope.get("partial_rotary_factor")) is not None:
        found[f"{arch}.rope.dimension_count"] = int(
            part * (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        )
    for name in ("bos", "eos"):
        if type(config.get(f"{name}_token_id")) is int:
            found[f"tokenizer.ggml.{name}_token_id"] = config[f"{name}_token_id"]
    return found


def _converted(stored: dict[str, Tensor], config: dict[str, Any], arch: str, merged: bool) -> dict[str, Tensor]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in stored.items():
        module, _, end = name.rpartition(".")
        if module in _WHOLE:
            new = f"{_WHOLE[module]}.{end}"
        else:
            layer, inner = module.removeprefix("model.layers.").split(".", 1)
            if ".experts." in inner:
                number, part = inner.partition(".experts.")[2].split(".")
                stem = f"blk.{layer}.ffn_{_EXPERT[part]}"
                experts.setdefault(f"{stem}_exps.{end}", {})[int(number)] = tensor
                if not merged:
                    found[f"{stem}.{number}.{end}"] = tensor
                continue
            new = f"blk.{layer}.{(_GEMMA if arch in ('gemma2', 'gemma3') else _LAYER)[inner]}.{end}"
            if arch in ("llama", "smollm3") and inner in ("self_attn.q_proj", "self_attn.k_proj"):
                count = heads if inner.endswith("q_proj") else kv_heads
                halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if "gemma" in arch and new.endswith("norm.weight"):
            tensor = tensor + 1
        found[new] = tensor[0] if new.endswith("shexp.weight") and tensor.shape[0] == 1 else tensor
    if merged:
        found |= {name: torch.stack([parts[at] for at in range(len(parts))]) for name, parts in experts.items()}
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_factors(rope, config)
    for name in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        found[f"rope_factors_{name}.weight"] = torch.tensor(rope[f"{name}_factor"])
    return found


def _llama3_factors(rope: dict[str, Any], config: dict[str, Any]) -> Tensor:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2) / size)) / scaled


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    wanted = GGMLQuantizationType[kind if tensor.dim() > 1 and "gate_inp" not in name else "F32"]
    values = tensor.float().numpy()
    if wanted == GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    elif wanted == GGMLQuantizationType.F16:
        writer.add_tensor(name, values.astype(numpy.float16))
    else:
        try:
            octets = gguf.quants.quantize(values, wanted)
        except NotImplementedError:  # only ggml's own code writes these
            octets = _random_blocks(values.shape, wanted)
        writer.add_tensor(name, octets, raw_dtype=wanted)


def _random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> numpy.ndarray[Any, Any]:
    """Blocks of random integers, whose scales make values of about 0.1 of them."""
    values, size_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = numpy.random.default_rng(0).integers(0, 256, (*shape[:-1], shape[-1] // values * size_bytes), numpy.uint8)
    flat = blocks.reshape(-1, size_bytes)
    for place, scale in _SCALES[kind.name].items():
        flat[:, place : place + 2] = numpy.frombuffer(numpy.float16(scale).tobytes(), numpy.uint8)
    return blocks


_SCALES = {
    "Q2_K": {80: 0.02, 82: 0.02}, "Q3_K": {108: 0.002}, "Q4_K": {0: 0.0005, 2: 0.002}, "Q5_K": {0: 0.0003, 2: 0.002},
    "Q6_K": {208: 0.0001}, "IQ4_NL": {0: 0.002}, "IQ4_XS": {0: 0.0001},
}  # fmt: skip


def dequantize(file: Path, out: Path) -> Path:
    """Write the model of a GGUF file with the floats that its blocks stand for."""
    reader = gguf.GGUFReader(file)
    writer = GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for key, found in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            _add(writer, key, found.contents())
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
