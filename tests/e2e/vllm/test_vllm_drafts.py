"""Drafts (`--speculative-config`): the same answers, with a draft in another folder or in the model's checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
PATIENCE_S = 300.0
BODY = {"prompt": "Return the", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
HIDDEN, HEADS, INNER = 64, 2, 96
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


def text(start: Start, model: Path, draft: dict[str, Any] | None) -> tuple[str, dict[str, float]]:
    """The model's continuation, and how many tokens the draft proposed and how many were accepted."""
    flags = () if draft is None else ("--", "--speculative-config", json.dumps(draft))
    dtype = ("--dtype", "float32")
    serving = start("--model", model, "--engine", "vllm", "--kv-cache-mb", "64", *dtype, *flags)
    status, answer, _ = serving.request("POST", "/v1/completions", BODY, PATIENCE_S)
    assert status == 200, answer
    names = ("accepted", "draft") if draft else ()
    counted = {name: serving.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in names}
    assert serving.stop() == 0
    return answer["choices"][0]["text"], counted


def layer(prefix: str, dice: Any) -> dict[str, Any]:
    """Random weights of a decoder's layer, in Qwen2's form."""
    import torch

    shapes = {f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {f"self_attn.{name}_proj.bias": (HIDDEN,) for name in "qkv"}
    shapes |= {f"mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (HIDDEN, INNER)
    found = {f"{prefix}.{name}": torch.randn(shape, generator=dice) / 6 for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return found | {f"{prefix}.{name}.weight": torch.ones(HIDDEN) for name in norms}


def write_model(folder: Path, example: Path, *, layers: int = 2, predicts: int = 0) -> Path:
    """Write a small random Qwen2, or a MiMo, which has a layer that predicts the token after the next one."""
    import torch
    from safetensors.torch import save_file

    dice = torch.Generator().manual_seed(5)
    vocabulary = json.loads((example / "config.json").read_text())["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocabulary, HIDDEN, generator=dice),
        "lm_head.weight": torch.randn(vocabulary, HIDDEN, generator=dice),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for number in range(layers):
        tensors |= layer(f"model.layers.{number}", dice)
    if predicts:
        prefix = "model.mtp_layers.0"
        tensors |= layer(prefix, dice)
        tensors[f"{prefix}.input_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=dice) / 8
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        tensors |= {f"{prefix}.{name}.weight": torch.ones(HIDDEN) for name in norms}
    config: dict[str, Any] = {
        "architectures": ["MiMoForCausalLM" if predicts else "Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": predicts,
        "dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    config |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers, "vocab_size": vocabulary}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 128}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / name, folder)
    return folder


def test_a_draft_model_in_another_folder_proposes_tokens(start: Start, example: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(example, tmp_path / "draft", ignore=shutil.ignore_patterns(".medusa"))
    expected, _ = text(start, example, None)
    flag = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    found, counted = text(start, example, flag)
    assert found == expected
    assert 6 <= counted["accepted"] <= counted["draft"]  # it is the same model


def test_the_layer_for_multi_token_prediction_in_the_models_checkpoint_proposes_tokens(
    start: Start, example: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "mimo", example, predicts=1)
    expected, _ = text(start, model, None)
    found, counted = text(start, model, {"method": "mtp", "num_speculative_tokens": 1})
    assert found == expected
    assert counted["draft"] > 0


def test_eagles_head_in_another_folder_proposes_tokens(start: Start, example: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    dice = torch.Generator().manual_seed(9)
    model = write_model(tmp_path / "model", example)
    head = write_model(tmp_path / "head", example, layers=1)
    config = json.loads((head / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (head / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    tensors = {name: tensor for name, tensor in layer("layers.0", dice).items() if "bias" not in name}
    del tensors["layers.0.input_layernorm.weight"]
    save_file(tensors | {"fc.weight": torch.randn(HIDDEN, 2 * HIDDEN, generator=dice) / 8}, head / "model.safetensors")
    expected, _ = text(start, model, None)
    found, counted = text(start, model, {"method": "eagle", "model": str(head), "num_speculative_tokens": 2})
    assert found == expected
    assert counted["draft"] > 0
