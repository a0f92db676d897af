"""What is read of config.json, beside real weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fetching import fetch_into
from medusa_runtime.engine.checkpoint_files import read_config
from medusa_runtime.region.reader import Region
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
}


def dtype_of(folder: Path, weights: list[torch.dtype], **config: Any) -> torch.dtype:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(
        {f"t{i}": torch.zeros(8, 4, dtype=dtype) for i, dtype in enumerate(weights)}, folder / "model.safetensors"
    )
    region = Region.create()
    try:
        fetch_into(region, str(folder))
        return read_config(region.file, region.wait_index()).dtype
    finally:
        region.close()


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([torch.bfloat16], torch.bfloat16),
        ([torch.float16], torch.float16),
        ([torch.float32], torch.float32),
        ([torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32], torch.bfloat16),
        ([torch.float8_e4m3fn], torch.bfloat16),
    ],
)
def test_a_config_without_dtype_has_that_of_its_weights(
    tmp_path: Path, weights: list[torch.dtype], expected: torch.dtype
) -> None:
    assert dtype_of(tmp_path, weights) == expected
    assert dtype_of(tmp_path, weights, torch_dtype=None, dtype=None) == expected


def test_the_config_s_dtype_counts_more_than_the_weights(tmp_path: Path) -> None:
    assert dtype_of(tmp_path, [torch.float32], dtype="bfloat16") == torch.bfloat16
    assert dtype_of(tmp_path, [torch.float32], torch_dtype="float16") == torch.float16
