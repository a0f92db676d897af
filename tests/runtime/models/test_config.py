"""Reading config.json: every form that checkpoints use, and one clear error for what cannot be run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError, CorruptError, MissingPackageError, ModelError
from medusa_runtime.models import ARCHITECTURES, model_config
from medusa_runtime.models.backend import backend
from medusa_runtime.models.llama import LlamaConfig
from medusa_runtime.models.registry import family
from medusa_runtime.models.sentences import SentenceEncoderSettings
from medusa_runtime.models.transformers.config import verify

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}


def llama(**changes: Any) -> LlamaConfig:
    config = model_config(LLAMA | changes)
    assert isinstance(config, LlamaConfig)
    return config


def test_reads_what_an_engine_asks() -> None:
    config = llama(torch_dtype="bfloat16", eos_token_id=[7, 9], num_key_value_heads=2, head_dim=None)
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (2, 16, 256)
    assert (config.dtype, config.eos_token_ids, config.tie_word_embeddings) == (torch.bfloat16, (7, 9), False)
    assert llama(dtype="float16", eos_token_id=3).eos_token_ids == (3,)
    assert llama(eos_token_id=[-1, 3]).eos_token_ids == (3,)
    for wrong in (True, [3, False], "3", [[3]]):
        with pytest.raises(ConfigError, match="expected eos_token_id to be a token id or a list"):
            llama(eos_token_id=wrong)
    assert llama().num_kv_heads == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**6},
        {"num_labels": 10**6},
        {"head_dim": 2**24},
        {"max_position_embeddings": 2**28},
        {"num_experts": 10**6},
        {"part": {"encoder_layers": 10**6}},
    ],
)
def test_transformers_is_not_given_a_size_that_no_model_has(changes: dict[str, Any]) -> None:
    """It made lists and tensors of such sizes, for gigabytes, before it or we refused them."""
    pytest.importorskip("transformers")
    [name] = changes
    for architecture in ("Gemma2ForCausalLM", "XLMRobertaForSequenceClassification"):
        raw = LLAMA | {"architectures": [architecture]}
        verify(raw)
        with pytest.raises(ConfigError, match=f"expected {name if name != 'part' else 'encoder_layers'} to be at most"):
            verify(raw | changes)


def test_a_long_type_of_model_is_no_path() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match="does not know the architecture Foreign"):
        verify({"architectures": ["Foreign"], "model_type": "a" * 1000})


def test_old_and_new_forms_of_rope_are_one() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64}
    new = llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "partial_rotary_factor": 1.0, **yarn})
    old = llama(rope_theta=1e6, partial_rotary_factor=1.0, rope_scaling={"type": "yarn", **yarn})
    assert new == old
    assert (new.rope.kind, new.rope.size, new.rope.theta) == ("yarn", 16, 1e6)
    assert llama(rope_scaling=None, rope_theta=5000).rope.theta == 5000


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_rope_scaling_that_is_added_to_the_new_form_counts_as_in_transformers(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    gemma = architecture.startswith("Gemma")
    default = {"rope_type": "default", "rope_theta": 5e5}
    raw = LLAMA | {
        "architectures": [architecture],
        "rope_parameters": {f"{kind}_attention": dict(default) for kind in ("full", "sliding")} if gemma else default,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config: Any = model_config(raw)
    made = (transformers.Gemma3TextConfig if gemma else transformers.LlamaConfig)(**raw)  # changes raw
    expected = made.rope_parameters["full_attention"] if gemma else made.rope_parameters
    assert {"rope_type": config.rope.kind, "rope_theta": config.rope.theta, "factor": config.rope.factor} == expected
    assert not gemma or (config.local_rope.kind, config.local_rope.theta) == ("default", 5e5)


def test_windows_of_each_layer() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert llama(sliding_window=8).windows == (None,) * 4  # Llama has none, whatever the file says
    assert llama(**mistral, sliding_window=8).windows == (8,) * 4
    assert llama(**mistral, sliding_window=None).windows == (None,) * 4
    assert llama(**mistral).windows == (4096,) * 4
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 3}
    assert llama(**qwen).windows == (None,) * 4
    assert llama(**qwen, use_sliding_window=True).windows == (None, None, None, 8)
    assert llama(**qwen | {"use_sliding_window": True, "max_window_layers": 0}).windows == (8,) * 4
    assert llama(**qwen | {"use_sliding_window": True, "max_window_layers": None}).windows == (None,) * 4
    assert llama(**qwen | {"use_sliding_window": True, "sliding_window": None}).windows == (None,) * 4
    kinds = ["full_attention", "sliding_attention"] * 2
    assert llama(**mistral, sliding_window=8, layer_types=kinds).windows == (None, 8, None, 8)
    assert llama(**qwen, use_sliding_window=True, layer_types=kinds).windows == (None, 8, None, 8)


def test_a_model_without_attention_is_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match="MambaForCausalLM: expected layers that attend"):
        model_config({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})


def test_a_type_of_layer_that_a_class_has_no_code_for_is_refused() -> None:
    """transformers takes any type that one of its models has, and then fails in the first forward."""
    pytest.importorskip("transformers.models.olmo3")
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    raw = sizes | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "eos_token_id": 1}
    types = ["full_attention", "sliding_attention"]
    assert model_config(raw | {"layer_types": types}).num_layers == 2
    expected = "layer_types to be of sliding_attention or full_attention, which Olmo3ForCausalLM has, found 'chunked"
    with pytest.raises(ConfigError, match=expected):
        model_config(raw | {"layer_types": ["full_attention", "chunked_attention"]})


def test_a_model_that_chooses_its_keys_is_refused() -> None:
    pytest.importorskip("transformers.models.deepseek_v32")
    with pytest.raises(ModelError, match="DeepseekV32ForCausalLM attends to keys that an index chooses"):
        model_config({"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"})


def test_a_model_whose_layers_differ_in_size_is_refused() -> None:
    pytest.importorskip("transformers.models.gemma4")
    with pytest.raises(ModelError, match=r"Gemma4ForCausalLM: expected layers of the same sizes.*found: 'head_dim'"):
        model_config({"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"})


def test_transformers_is_not_asked_for_where_it_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_runtime.models.transformers.catalog.installed", lambda: None)
    with pytest.raises(MissingPackageError, match=r"GPT2LMHeadModel .* need transformers, which is not installed: pip"):
        model_config({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder and a decoder"):
        model_config({"architectures": ["T5ForConditionalGeneration"]})


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ModelError) as caught:
        llama(architectures=["NoSuchForCausalLM"])
    assert "NoSuchForCausalLM" in str(caught.value)
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    assert "--engine vllm" in str(caught.value)


SLIDING = ["sliding_attention"] * 4
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"architectures": None}, ModelError, "a list of names such as .*, found none; .*--engine none"),
        ({"hidden_size": None}, ConfigError, "expected hidden_size to be a positive integer, found nothing"),
        ({"num_hidden_layers": "4"}, ConfigError, "num_hidden_layers"),
        ({"hidden_size": 65}, ConfigError, "a multiple of the 4 attention heads, found 65"),
        ({"num_key_value_heads": 3}, ConfigError, "num_key_value_heads"),
        ({"hidden_act": "mish"}, ConfigError, "hidden_act to be one of silu"),
        ({"torch_dtype": "int8"}, ConfigError, "torch_dtype to be one of float32"),
        ({"quantization_config": {"quant_method": "awq"}}, ModelError, "--engine vllm"),
        ({"rope_scaling": {"rope_type": "longrope"}}, ModelError, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, ConfigError, "expected factor to be a number"),
        ({"rope_scaling": "yarn"}, ConfigError, "rope_scaling to be an object"),
        ({"architectures": ["FalconForCausalLM"], "alibi": True}, ModelError, "ALiBi"),
        (QWEN | {"max_window_layers": "x"}, ConfigError, "max_window_layers to be an integer of 0 or more, found 'x'"),
        (QWEN | {"layer_types": 5}, ConfigError, "layer_types to be a list of names, found 5"),
        (QWEN | {"layer_types": [{}] * 4}, ConfigError, "layer_types to be a list of names"),
        (MIXTURE | {"num_experts": None}, ConfigError, "num_experts to be a positive integer, found nothing"),
        (MIXTURE | {"num_experts": 10**6}, ConfigError, "num_experts to be at most 16384, found 1000000"),
        (MIXTURE | {"num_experts_per_tok": 5}, ConfigError, "at most the number of experts, 4, found 5"),
        (MIXTURE | {"mlp_only_layers": "1"}, ConfigError, "mlp_only_layers to be a list of layers' numbers, found '1'"),
        ({"num_hidden_layers": 10**9}, ConfigError, "num_hidden_layers to be at most 10000, found 1000000000"),
        ({"intermediate_size": 2**62}, ConfigError, "intermediate_size to be at most 2147483647"),
        ({"vocab_size": 10**5000}, ConfigError, "found a number of thousands of digits"),
        ({"hidden_act": "x" * 10**6}, ConfigError, "found 'x{99}…$"),
        ({"rms_norm_eps": float("nan")}, ConfigError, "rms_norm_eps to be a number of 0 or more, found nan"),
        ({"rms_norm_eps": -1e-6}, ConfigError, "rms_norm_eps to be a number of 0 or more"),
        ({"rms_norm_eps": 10**400}, ConfigError, "rms_norm_eps to be a number of 0 or more"),
        ({"rope_theta": float("inf")}, ConfigError, "rope_theta to be a number of 0 or more, found inf"),
        ({"rope_theta": 0}, ConfigError, "rope_theta to be a number above 0, found 0"),
        ({"partial_rotary_factor": -4}, ConfigError, "partial_rotary_factor to be a number"),
        ({"partial_rotary_factor": 0.5}, ModelError, "to rotate a part of each head, .*--engine vllm"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ModelError, "to rotate a part of each head"),
        ({"head_dim": 7}, ConfigError, "head_dim to be an even number of at least 2, .*, found 7"),
        ({"head_dim": 2} | DYNAMIC, ConfigError, "head_dim to be an even number of at least 4, .*, found 2"),
        ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2}}, ConfigError, "another number than 1"),
        (
            QWEN | {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            ConfigError,
            "sliding_window to be",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ConfigError, "factor to be a number above 0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, ConfigError, "more than the low_freq_factor of 1"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=r"(?s).*" + said):
        model_config(LLAMA | changes)


DEEP = b"[" * 100_000


def test_where_a_config_is_no_json_is_named() -> None:
    with pytest.raises(CorruptError, match="expected JSON, found something else at line 2, column 1"):
        backend({"config.json": b"{\n"}.get, Settings(model="m"))


@pytest.mark.parametrize("text", [DEEP, b"{", b"\xff", b"null", b"[]"])
def test_a_config_that_is_no_json_object_is_corrupt(text: bytes) -> None:
    with pytest.raises(CorruptError, match=r"config\.json: expected (JSON|a JSON object), found"):
        backend({"config.json": text}.get, Settings(model="m"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"modules.json": DEEP}, r"modules\.json: expected JSON"),
        ({"modules.json": b"{}"}, r"modules\.json: expected a list of modules"),
        (
            {"modules.json": b"[]", "sentence_bert_config.json": b"[1]"},
            r"sentence_bert_config\.json: expected a JSON obj",
        ),
    ],
)
def test_a_sentence_encoders_files_are_named_when_they_are_corrupt(files: dict[str, bytes], said: str) -> None:
    with pytest.raises(CorruptError, match=said):
        SentenceEncoderSettings.read(files.get)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_builds_without_memory(architecture: str) -> None:
    others = {"ffn_dim": 96, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = model_config(LLAMA | others | {"architectures": [architecture]}).model()
    assert type(model) is family(architecture)
    assert not model.training
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(model.layers) == model.config.num_layers == 4
