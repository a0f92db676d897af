"""Gemma 3: transformers' tokens from windows, chunks and quantized weights; both forms of its config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_fixtures import SETTINGS, Served
from medusa_runtime.errors import ConfigError, ModelError
from medusa_runtime.models import model_config
from medusa_runtime.models.gemma3 import Gemma3Config

from benchmarks.quantize import quantize

transformers = pytest.importorskip("transformers")
SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 256, "sliding_window": 6,
}  # fmt: skip
PROMPTS = [list(range(5, 60)), [8, 30, 77], [41] * 20]
# As the Hub has it, from before transformers 5.
OLD = SHAPE | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16",
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "eos_token_id": [1, 106],
    "rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "sliding_window_pattern": 6,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model; every parameter is random, so that none goes unnoticed."""
    found = tmp_path_factory.mktemp("gemma3")
    torch.manual_seed(5)
    config = transformers.Gemma3TextConfig(
        **SHAPE, query_pre_attn_scalar=16, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(found)
    return found


def by_transformers(folder: Path, prompt: list[int], count: int) -> list[int]:
    model = transformers.Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def test_tokens_are_those_of_transformers(folder: Path, serve: Callable[..., Served]) -> None:
    served = serve(folder, max_batched_tokens=max(12, SETTINGS.max_concurrency))  # prompts come in chunks
    answers = [served.ask(prompt, max_tokens=12, logit_bias={2: -100.0}) for prompt in PROMPTS]
    assert [answer.tokens for answer in answers] == [by_transformers(folder, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["gptq-4", "fp8-blocks"])
def test_weights_may_be_quantized(name: str, folder: Path, tmp_path: Path, serve: Callable[..., Served]) -> None:
    stored, floats = tmp_path / "stored", tmp_path / "floats"
    quantize(folder, stored, name, dequantized=floats)
    answers = [
        serve(each, max_concurrency=2).ask(PROMPTS[1], max_tokens=8, logit_bias={2: -100.0}).tokens
        for each in (stored, floats)
    ]
    assert answers[0] == answers[1]


def test_old_and_new_forms_of_the_config_are_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "new")
    new = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_theta" not in new
    config = model_config(OLD)
    assert isinstance(config, Gemma3Config)
    assert config == model_config(new)
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert (config.local_rope.kind, config.local_rope.theta) == ("default", 1e4)
    assert config.windows == (6, 6, 6, 6, 6, None)
    assert (config.scale, config.tie_word_embeddings, config.eos_token_ids) == (0.25, True, (1, 106))


def test_what_is_not_computed_is_refused() -> None:
    with pytest.raises(ModelError, match=r"see later ones .*use_bidirectional_attention"):
        model_config(OLD | {"use_bidirectional_attention": True}).check_generates()
    with pytest.raises(ConfigError, match="expected layer_types to be 6 times full_attention or sliding_attention"):
        model_config(OLD | {"layer_types": ["sliding_attention"] * 5})
    with pytest.raises(ConfigError, match="expected rope_parameters to be an object with an object full_attention"):
        model_config(OLD | {"rope_parameters": {"full_attention": "yarn"}})
