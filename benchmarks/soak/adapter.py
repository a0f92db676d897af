"""A small LoRA adapter for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path


def write_adapter(folder: Path, checkpoint: Path, rank: int = 4) -> Path:
    """Write an adapter of zeros for the attention's linear layers, as PEFT would, and return its folder."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    targets = ["q_proj", "v_proj"]
    tensors = {}
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:  # type: ignore[no-untyped-call]
        for name in weights.keys():  # noqa: SIM118 it is no dict
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in targets:
                rows, columns = weights.get_slice(name).get_shape()
                tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(rank, columns)
                tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(rows, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(checkpoint), "r": rank,
              "lora_alpha": 8, "target_modules": targets, "bias": "none"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
