"""LoRA adapters as PEFT writes them, with random values, and checkpoints with the same values merged in."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = LLAMA_TARGETS,
    **config: Any,
) -> Path:
    """An adapter for the linear layers of a checkpoint whose names end with one of the ``targets``."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or module.rpartition(".")[2] not in targets:
            continue
        own = config.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
        a = torch.randn(own, weight.shape[1], generator=generator) * 0.3
        b = torch.randn(weight.shape[0], own, generator=generator) * 0.3
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    found = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(found))
    return folder


def merge(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """A checkpoint whose weights have the adapter's products added."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    weights = load_file(checkpoint / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[name.replace("lora_A", "lora_B")]
        alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0])
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (b @ a)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
