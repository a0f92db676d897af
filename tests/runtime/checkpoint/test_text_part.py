"""The decoder inside a config.json, the names of its tensors, and a fetch of nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from medusa_runtime.checkpoint.order import layer_numbers, layers_first
from medusa_runtime.checkpoint.text_names import text_name
from medusa_runtime.checkpoint.text_part import has_text_part, only_text, text_config
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError, MedusaError, ModelError
from medusa_runtime.instance.engine_fetch import prefetch_for_engine
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

MIB = 1 << 20
GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
# As the Hub has it for the model with 4 billion parameters: all other keys have transformers' values.
TEXT = {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
# In the order of a file: the vision tower has bytes before the text part, and most bytes behind it.
SIZES = {
    "vision_tower.embeddings.weight": 6 * MIB,
    "language_model.model.embed_tokens.weight": 2 * MIB,
    "language_model.model.layers.0.w": 3 * MIB,
    "language_model.lm_head.weight": MIB,
    "vision_tower.layers.0.w": 30 * MIB,
    "multi_modal_projector.w": MIB,
}


def test_the_decoder_inside() -> None:
    found = text_config(GEMMA | {"text_config": TEXT, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"})
    assert found["architectures"] == ["Gemma3ForCausalLM"]
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["vocab_size"]) == (8, 4, 262208)
    assert (found["eos_token_id"], found["torch_dtype"], found["hidden_size"]) == ([1, 106], "bfloat16", 2560)
    plain = {"architectures": ["LlamaForCausalLM"], "text_config": 3}
    assert text_config(plain) == plain
    assert not has_text_part(plain)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({}, ConfigError, "expected text_config to be an object with the decoder's keys, found nothing"),
        ({"text_config": None}, ConfigError, "found nothing"),
        ({"text_config": [1]}, ConfigError, r"found \[1\]"),
        ({"text_config": {}}, ModelError, "expected the model_type of text_config to be one of gemma3_text.*nothing"),
        ({"text_config": TEXT | {"model_type": "mllama"}}, ModelError, "found 'mllama'; .* or --engine vllm"),
        ({"text_config": TEXT | {"model_type": ["x"]}}, ModelError, "found .*x"),
    ],
)
def test_other_files_are_refused(changes: dict[str, Any], error: type[MedusaError], words: str) -> None:
    with pytest.raises(error, match=words):
        text_config(GEMMA | changes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("language_model.model.layers.0.w", "model.layers.0.w"),
        ("model.language_model.layers.0.w", "model.layers.0.w"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.w", "model.layers.0.w"),
        ("visual.blocks.0.w", None),
        ("model.visual.blocks.0.w", None),
        ("vision_tower.layers.0.w", None),
        ("model.multi_modal_projector.w", None),
        ("image_newline", None),
        ("mtp.layers.0.w", None),
        ("visuals.w", "visuals.w"),
    ],
)
def test_names(name: str, expected: str | None) -> None:
    assert text_name(name) == expected


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_torch_engine_fetches_the_text_part_alone(
    engine: str, region: Region, origin: Any, safetensors_file: Callable[..., bytes]
) -> None:
    tensors = {name: ("U8", [size], os.urandom(size)) for name, size in SIZES.items()}
    origin.put("/m/model.safetensors", safetensors_file(tensors))
    origin.put("/m/config.json", json.dumps(GEMMA | {"text_config": TEXT}).encode())
    with closing(Timeline.create("prefetcher")) as timeline:
        prefetch_for_engine(region, Settings(model=f"{origin.url}/m", engine=engine, state="none"), timeline)
    index = region.wait_index()
    progress = region.progress()
    assert progress.state == "done"
    for name in index.order:
        region.wait_tensor(name, timeout_s=60)
        entry = index.tensors[name]
        assert region.shard(entry.shard)[entry.start : entry.stop] == tensors[name][2], name
    if engine == "vllm":
        assert set(index.tensors) == set(SIZES)
        return
    assert list(index.tensors) == [name for name in SIZES if name.startswith("language_model.")]
    assert progress.fetched_bytes == progress.total_bytes <= 8 * MIB  # chunks of 1 MiB, at whose ends others begin
    assert 6 * MIB <= origin.sent_bytes <= 9 * MIB  # with the header


def test_a_damaged_config_leaves_the_index_as_it_is(region: Region) -> None:
    from medusa_runtime.checkpoint.index import WeightIndex

    index = WeightIndex((), {})
    for config in (None, b"{", b"[]", b"{}"):
        assert only_text(index, config) is index


def test_layers_are_those_of_the_decoder() -> None:
    eyes = [f"model.visual.blocks.{number}.w" for number in range(5)]
    text = [f"model.language_model.layers.{number}.w" for number in range(3)]
    order = ["model.language_model.embed_tokens.weight", *text, *eyes, "model.language_model.norm.weight", "lm_head.w"]
    assert layer_numbers(order) == {name: number for number, name in enumerate(text)}
    first, last = layers_first(order, 0, 2)[0], layers_first(order, 2, 3)[0]
    assert first == [order[0], *text[:2], *eyes]
    assert last == [text[2], "model.language_model.norm.weight", "lm_head.w"]
