"""What strangers write into adapter_config.json and quantization_config: any JSON, and endless expressions."""

from __future__ import annotations

import json
import time

import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_runtime.checkpoint.adapter import AdapterConfig, adapted_modules, adapter_urls
from medusa_runtime.checkpoint.index import TensorEntry
from medusa_runtime.errors import ConfigError, MedusaError, MismatchError
from medusa_runtime.load.quantized.scheme import Quantization

ADAPTER = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "rank_pattern": {"^a.q_proj": 4},
    "alpha_pattern": {"k_proj": 2.5}, "use_rslora": True, "bias": "none", "init_lora_weights": "gaussian",
    "base_model_name_or_path": "m",
}  # fmt: skip
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
QUANTIZED = (
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*lm_head"],
     "config_groups": {"a": {"targets": ["Linear", "re:.*mlp.*"], "weights": WEIGHTS}}},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*gate": {}, "+:.*up": {"bits": 8}}},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
)  # fmt: skip


def test_fuzzed_adapter_configs() -> None:
    def check(data: bytes) -> None:
        try:
            config = AdapterConfig.read(data)
        except MedusaError:
            return
        assert 0 < config.rank < 1e6
        for module in ("model.layers.0.self_attn.q_proj", "a.q_proj", ""):
            assert config.rank_of(module) >= 1
            assert config.scale_of(module) > 0

    fuzz(st.binary(max_size=40), check, [json.dumps(ADAPTER).encode()])


def test_many_targets_of_an_adapter_take_no_long_time() -> None:
    """Each may end the names of many modules, of which a file may have hundreds of thousands."""
    entry = TensorEntry(0, 0, 16, "F32", (2, 2))
    modules = [f"layers.{number}.q_proj" for number in range(30_000)]
    tensors = {f"base_model.model.{module}.lora_A.weight": entry for module in modules}

    def config(targets: list[str]) -> AdapterConfig:
        return AdapterConfig.read(json.dumps(ADAPTER | {"target_modules": targets}).encode())

    began = time.monotonic()
    assert adapted_modules(config(modules), tensors) == modules
    assert adapted_modules(config(["29999.q_proj"] * 30_000), tensors) == modules
    with pytest.raises(MismatchError, match="expected names of modules, or at most 10,000 endings of them"):
        adapted_modules(config([f"{number}.q_proj" for number in range(30_000)]), tensors)
    assert time.monotonic() - began < 10


def test_fuzzed_urls_of_adapters() -> None:
    def check(data: bytes) -> None:
        try:
            urls = adapter_urls(data.decode("utf-8", "surrogateescape"))
        except MedusaError:
            return
        assert urls

    fuzz(st.binary(max_size=40), check, [b"s3://bucket/adapters/one?x=1", b"/models/a.safetensors", b"https://[::1]/a"])


def test_fuzzed_quantization_configs() -> None:
    def check(data: bytes) -> None:
        try:
            config = {"quantization_config": json.loads(data)}
        except (ValueError, RecursionError):
            return
        try:
            found = Quantization.of(config)
            if found is not None:
                for module in ("model.layers.0.mlp.gate_proj", "lm_head", ""):
                    found.scheme(module)
        except MedusaError:
            pass

    fuzz(st.binary(max_size=40), check, [json.dumps(one).encode() for one in QUANTIZED])


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|aa)*b", "(a?a?){99}b", "(?:(?:a*)*)*b", "a?" * 60 + "a" * 60, "(a|aa)" * 60 + "b", ".*" * 20 + "x",
     "(?=(a+)+b)", "(a+)+b|.*", "a" * 1000, "("],
)  # fmt: skip
def test_an_expression_that_may_take_for_ever_is_refused(pattern: str) -> None:
    config = {"quantization_config": QUANTIZED[1] | {"dynamic": {f"-:{pattern}": {}}}}
    with pytest.raises(ConfigError, match="regular expression"):
        Quantization.of(config)


@pytest.mark.parametrize(
    "pattern",
    [".*lm_head", r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj", r"^(?!.*experts).*$",
     r"(.*\.)?layers\.[0-9]+\..*gate.*", ".*.*.*x"],
)  # fmt: skip
def test_expressions_as_they_are_written_are_taken_and_quick(pattern: str) -> None:
    found = Quantization.of({"quantization_config": QUANTIZED[1] | {"dynamic": {f"-:{pattern}": {}}}})
    assert found is not None
    began = time.thread_time()
    for name in ("a" * 256, "model.layers." + "1" * 240, "." * 256):
        found.scheme(name)
    assert time.thread_time() - began < 2
    with pytest.raises(ConfigError, match="256 characters"):
        found.scheme("a" * 257)
