"""Legal config.json files that no tool writes: absent keys, keys of other families, and heads of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_runtime.models import model_config
from medusa_runtime.models.layers.whole import WholeAttention
from reference_models import CASES, PROMPT, loaded, logits, reference
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
FULL, SLIDING = "full_attention", "sliding_attention"
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "activation of another name": ("gemma3", {"hidden_act": "relu"}),
    "types of Mistral's layers": ("mistral-window", {"layer_types": [FULL, SLIDING, FULL]}),
    "types of Mixtral's layers": ("mixtral-window", {"layer_types": [FULL] * 3}),
    "dense layers of Mixtral": ("mixtral", {"mlp_only_layers": [0]}),
    "length beside the rope": ("llama-untied", {"original_max_position_embeddings": 8, "rope_parameters": YARN}),
    "length beside ropes": ("gemma3-tuned", {"original_max_position_embeddings": 8}),
    "empty rope": ("gpt-oss", {"rope_parameters": None, "rope_scaling": {}}),
    "size of OPT's heads": ("opt", {"head_dim": 16}),
}


def changed(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))


def check(folder: Path) -> None:
    """Check that the logits are those of transformers, as it loads the folder."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode(), loaded(folder) as ours:
        expected = theirs(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(logits(ours, PROMPT), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CHANGES)
def test_keys_count_as_for_transformers(name: str, tmp_path: Path) -> None:
    case, changes = CHANGES[name]
    with torch.no_grad():
        reference(case, tmp_path, torch.float32)
    changed(tmp_path, changes)
    check(tmp_path)


@pytest.mark.parametrize("case", ["llama-untied", "gemma3-tuned", "opt-plain"])
def test_a_head_of_its_own_counts_also_where_the_config_ties_it(case: str, tmp_path: Path) -> None:
    with torch.no_grad():
        reference(case, tmp_path, torch.float32)
    changed(tmp_path, {"tie_word_embeddings": True})
    check(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")  # and a single tensor for both, under either name
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check(tmp_path)


def test_a_head_of_another_name_counts_as_well(tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.GPTNeoXConfig(**sizes, intermediate_size=48, max_position_embeddings=64)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    changed(tmp_path, {"tie_word_embeddings": True})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens, places = torch.tensor(PROMPT), torch.arange(len(PROMPT))
    with torch.inference_mode(), loaded(tmp_path) as ours:
        found = ours.run(tokens, places, WholeAttention(), places)
        torch.testing.assert_close(found, theirs(tokens[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "case", ["llama-untied", "mistral", "mixtral", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "gemma3", "gpt-oss"]
)
def test_an_absent_key_has_the_value_that_transformers_gives_it(case: str) -> None:
    family, values = CASES[case]
    needed = {name: value for name, value in values.items() if name in SIZES}
    theirs = getattr(transformers, f"{family}ForCausalLM").config_class(**needed)
    ours: Any = model_config(needed | {"architectures": [f"{family}ForCausalLM"]})
    layers, window = theirs.num_hidden_layers, getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or [SLIDING if window else FULL] * layers
    rope = theirs.rope_parameters.get(FULL, theirs.rope_parameters)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.max_positions, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.windows == tuple(window if kind == SLIDING else None for kind in kinds)
    assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"])
