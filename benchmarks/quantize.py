"""Quantize a checkpoint by rounding, in any format that the torch engine reads.

    python -m benchmarks.quantize --model out/llama-57m --format awq --out out/llama-57m-awq

``--format`` is one of ``FORMATS``, or mxfp4 for the experts of a GPT-OSS. ``--dequantized FOLDER`` also writes the
floats that the integers stand for, as an ordinary checkpoint: the same model, unquantized.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_EPSILON = 1e-6
_LINEAR = ("proj", "_proj_with_mqa", ".w1", ".w2", ".w3", ".query", ".key", ".value", ".query_key_value", ".dense")
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbouring columns is in each nibble of a word, lowest nibble first
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Options(NamedTuple):
    """The options of a format.

    ``group`` is the number of columns that share a scale (0: all), and ``block`` the rows and columns that share one in
    fp8. With ``shuffled``, the columns of a group are not neighbours.
    """

    bits: int = 8
    group: int = 32
    symmetric: bool = True
    block: tuple[int, int] = (32, 32)
    shuffled: bool = False
    v2: bool = False


class Quantized(NamedTuple):
    """The tensors of one weight, by their suffix, and the float32 values that they stand for."""

    tensors: dict[str, Tensor]
    floats: Tensor


class Format(NamedTuple):
    """A format. ``takes`` returns whether it is for a tensor with this name and so many dimensions."""

    quantize: Callable[[Tensor, Options], Quantized]
    config: Callable[[Options], dict[str, Any]]
    options: Options = Options()
    takes: Callable[[str, int], bool] = lambda name, dimensions: dimensions == 2 and _is_linear(name)


def _codes(blocks: Tensor, options: Options, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize blocks [..., values that share a scale]. Return integers from 0 on, scales and zero points [..., 1]."""
    top = (1 << options.bits) - 1
    if options.symmetric:
        scale = (blocks.abs().amax(-1, keepdim=True) / (top // 2)).clamp(min=_EPSILON)
        zero = torch.full_like(scale, (top + 1) // 2)
    else:
        low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / top).clamp(min=_EPSILON)
        zero = (-low / scale).round().clamp(0, top)
    scale = scale.to(dtype).float()
    return (blocks / scale + zero).round().clamp(0, top).int(), scale, zero.int()


def _words(values: Tensor, bits: int) -> Tensor:
    """Pack integers [..., n * 32 / bits] into int32 [..., n], the first integer into the lowest bits."""
    per_word = 32 // bits
    values = values.long().unflatten(-1, (-1, per_word))
    word = sum(values[..., at] << (bits * at) for at in range(per_word))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def _whole(weight: Tensor, options: Options) -> Tensor:
    """Divide weight [out, in] into [out, groups, columns of a group]."""
    return weight.unflatten(1, (-1, options.group or weight.shape[1]))


def _int8(weight: Tensor, options: Options) -> Quantized:
    values, scale, zero = _codes(_whole(weight, options), options, weight.dtype)
    middle = 1 << (options.bits - 1)
    tensors = {
        "weight": (values - middle).to(torch.int8).flatten(1),
        "weight_scale": scale.squeeze(-1).to(weight.dtype),
    }
    if not options.symmetric:
        tensors["weight_zero_point"] = (zero - middle).squeeze(-1).to(torch.int8)
    return Quantized(tensors, ((values - zero) * scale).flatten(1))


def _packed(weight: Tensor, options: Options) -> Quantized:
    values, scale, zero = _codes(_whole(weight, options), options, weight.dtype)
    tensors = {
        "weight_packed": _words(values.flatten(1), options.bits),
        "weight_scale": scale.squeeze(-1).to(weight.dtype),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not options.symmetric:
        tensors["weight_zero_point"] = _words(zero.squeeze(-1).t(), options.bits).t()
    return Quantized(tensors, ((values - zero) * scale).flatten(1))


def _gptq(weight: Tensor, options: Options) -> Quantized:
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if options.shuffled else None
    values, scale, zero = _codes(_whole(weight if order is None else weight[:, order], options), options, torch.half)
    floats, values = ((values - zero) * scale).flatten(1), values.flatten(1)
    group_of = torch.arange(columns) // (options.group or columns)
    if order is not None:
        back = order.argsort()
        floats, values, group_of = floats[:, back], values[:, back], group_of[back]
    stored = zero.squeeze(-1) if options.v2 else (zero.squeeze(-1) - 1) & ((1 << options.bits) - 1)
    return Quantized(
        {
            "qweight": _words(values, options.bits).t(),
            "qzeros": _words(stored.t(), options.bits),
            "scales": scale.squeeze(-1).t().half(),
            "g_idx": group_of.int(),
        },
        floats,
    )


def _awq(weight: Tensor, options: Options) -> Quantized:
    values, scale, zero = _codes(_whole(weight, options), options, torch.half)

    def words(matrix: Tensor) -> Tensor:
        return _words(matrix.unflatten(1, (-1, 8))[..., list(_AWQ)].flatten(1), 4)

    tensors = {
        "qweight": words(values.flatten(1).t()),
        "qzeros": words(zero.squeeze(-1).t()),
        "scales": scale.squeeze(-1).t().half(),
    }
    return Quantized(tensors, ((values - zero) * scale).flatten(1))


def _fp8(weight: Tensor, options: Options) -> Quantized:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (weight.abs().amax(1, keepdim=True) / largest).clamp(min=_EPSILON).to(weight.dtype)
    values = (weight.float() / scale.float()).to(torch.float8_e4m3fn)
    return Quantized({"weight": values, "weight_scale": scale}, values.float() * scale.float())


def _fp8_blocks(weight: Tensor, options: Options) -> Quantized:
    high, wide = options.block
    largest = torch.finfo(torch.float8_e4m3fn).max
    blocks = [[block.float() for block in rows.split(wide, 1)] for rows in weight.split(high)]
    scale = torch.tensor([[max(float(block.abs().max()) / largest, _EPSILON) for block in row] for row in blocks])
    values = [
        torch.cat([(block / scale[i, j]).to(torch.float8_e4m3fn) for j, block in enumerate(row)], 1)
        for i, row in enumerate(blocks)
    ]
    whole = torch.cat(values)
    each = scale.repeat_interleave(high, 0)[: len(weight)].repeat_interleave(wide, 1)[:, : weight.shape[1]]
    return Quantized({"weight": whole, "weight_scale_inv": scale}, whole.float() * each)


def mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize blocks [..., 32] to E2M1. Return bytes [..., 16] and exponents [...].

    The first value of two is in the lower nibble. As in Open Compute's specification, a scale is the power of two of
    the largest value over that of the largest E2M1.
    """
    largest = blocks.float().abs().amax(-1)
    exponent = (torch.frexp(largest).exponent - 1 - 2 + 127).clamp(0, 254)
    scaled = blocks.float() / torch.exp2(exponent.float() - 127).unsqueeze(-1)
    middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(_E2M1)])
    nibbles = torch.bucketize(scaled.abs(), middles) + 8 * (scaled < 0)
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(torch.uint8), exponent.to(torch.uint8)


def _experts(weight: Tensor, options: Options) -> Quantized:
    """Quantize the weights of all experts of GPT-OSS [experts, in, out]."""
    stored, exponents = mxfp4(weight.transpose(1, 2).contiguous().unflatten(-1, (-1, options.group)))
    signed = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    values = torch.stack((signed[(stored & 15).int()], signed[(stored >> 4).int()]), -1).flatten(-2)
    floats = values * torch.exp2(exponents.float() - 127).unsqueeze(-1)
    return Quantized({"_blocks": stored, "_scales": exponents}, floats.flatten(2).transpose(1, 2).contiguous())


def _is_of_experts(name: str, dimensions: int) -> bool:
    return dimensions == 3 and name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def _mxfp4_config(options: Options) -> dict[str, Any]:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": kept}


def _compressed(form: str, kind: str = "int") -> Callable[[Options], dict[str, Any]]:
    def config(options: Options) -> dict[str, Any]:
        grouped = kind == "int" and options.group
        weights = {
            "num_bits": options.bits,
            "type": kind,
            "symmetric": options.symmetric,
            "strategy": "group" if grouped else "channel",
            "group_size": options.group if grouped else None,
            "dynamic": False,
        }
        dynamic = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None if form == "pack-quantized" else dynamic,
                    "output_activations": None,
                }
            },
        }

    return config


def _gptq_config(options: Options) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": options.bits,
        "group_size": options.group or -1,
        "desc_act": options.shuffled,
        "sym": options.symmetric,
        "checkpoint_format": "gptq_v2" if options.v2 else "gptq",
    }


def _awq_config(options: Options) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": options.group, "zero_point": True, "version": "gemm"}


def _fp8_config(options: Options) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(options.block),
        "modules_to_not_convert": ["lm_head"],
    }


_INT, _PACK = _compressed("int-quantized"), _compressed("pack-quantized")
FORMATS: dict[str, Format] = {
    "int8": Format(_int8, _INT, Options(group=0)),
    "int8-asymmetric": Format(_int8, _INT, Options(group=0, symmetric=False)),
    "naive-4": Format(_int8, _compressed("naive-quantized"), Options(bits=4)),
    "pack-4": Format(_packed, _PACK, Options(bits=4)),
    "pack-4-asymmetric": Format(_packed, _PACK, Options(bits=4, symmetric=False)),
    "pack-8": Format(_packed, _PACK, Options(group=0)),
    "fp8": Format(_fp8, _compressed("float-quantized", "float")),
    "fp8-blocks": Format(_fp8_blocks, _fp8_config, Options(block=(48, 40))),
    "gptq-4": Format(_gptq, _gptq_config, Options(bits=4)),
    "gptq-8": Format(_gptq, _gptq_config, Options(group=0)),
    "gptq-4-act-order": Format(_gptq, _gptq_config, Options(bits=4, shuffled=True, symmetric=False)),
    "gptq-v2": Format(_gptq, _gptq_config, Options(bits=4, symmetric=False, v2=True)),
    "awq": Format(_awq, _awq_config, Options(bits=4, symmetric=False)),
}
EXPERT_FORMATS = {"mxfp4": Format(_experts, _mxfp4_config, takes=_is_of_experts)}  # for GPT-OSS


def _is_linear(name: str) -> bool:
    """Return whether checkpoints quantize this tensor: a weight of attention, an MLP or an expert."""
    return name.removesuffix(".weight").endswith(_LINEAR) and name.endswith(".weight")


def quantize(
    source: Path, out: Path, name: str, *, dequantized: Path | None = None, options: Options | None = None
) -> None:
    """Write the checkpoint in ``source`` to ``out``, with the linear weights of its layers in a format.

    ``options`` replaces the format's own options. Tensors keep their order in the file.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    found = (FORMATS | EXPERT_FORMATS)[name]
    options = options or found.options
    quantized: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    with safe_open(str(source / "model.safetensors"), "pt") as file:
        for key in file.offset_keys():
            tensor = file.get_tensor(key)
            if found.takes(key, tensor.dim()):
                made = found.quantize(tensor, options)
                stem = key.removesuffix("weight")
                quantized |= {stem + suffix: part.contiguous() for suffix, part in made.tensors.items()}
                floats[key] = made.floats.to(tensor.dtype)
            else:
                quantized[key] = floats[key] = tensor
    config = json.loads((source / "config.json").read_bytes())
    for folder, tensors, changes in (
        (out, quantized, {"quantization_config": found.config(options)}),
        (dequantized, floats, {}),
    ):
        if folder is None:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for other in source.iterdir():
            if other.suffix == ".json" and other.name != "config.json":
                shutil.copy(other, folder)
        save_file(tensors, str(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(config | changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with one safetensors file")
    parser.add_argument("--format", choices=FORMATS | EXPERT_FORMATS, required=True)
    parser.add_argument("--group", type=int, help="columns that share a scale; default: 32")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dequantized", type=Path)
    given = parser.parse_args()
    options = (FORMATS | EXPERT_FORMATS)[given.format].options
    options = options if given.group is None else options._replace(group=given.group)
    quantize(given.model, given.out, given.format, dequantized=given.dequantized, options=options)


if __name__ == "__main__":
    main()
