"""Quantized checkpoints: each format gives the floats that it stands for, and what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import SETTINGS, Served, byte_level_tokenizer, fill_region
from medusa_runtime.engine.checkpoint_files import read_config
from medusa_runtime.engine.torch import kv_size
from medusa_runtime.engine.torch.kv_size import free_bytes
from medusa_runtime.engine.torch.profile import profile
from medusa_runtime.errors import ConfigError, MismatchError, ModelError
from medusa_runtime.kernels.quantized import QuantizedParameter
from medusa_runtime.load.loader import Loader
from medusa_runtime.load.part_applier import PartApplier
from medusa_runtime.load.quantized import codes, unpack
from medusa_runtime.load.quantized.layouts import QuantizedWeight, _group_of
from medusa_runtime.load.quantized.scheme import Quantization, Scheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quantize import FORMATS, Options, quantize

LINEAR = "model.layers.1.mlp.down_proj"


def loaded(folder: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The parameters of the model in a folder."""
    region = fill_region(folder)
    try:
        config = read_config(region.file, region.wait_index())
        model = config.model()
        with Loader(region, model.applier(dtype or config.dtype)) as loader:
            loader.wait()
        return {name: parameter.clone() for name, parameter in model.named_parameters()}
    finally:
        region.close()


def change(folder: Path, **changes: Any) -> None:
    """Replace tensors of ``LINEAR`` by their suffix; None takes one away."""
    tensors = load_file(folder / "model.safetensors")
    for suffix, tensor in changes.items():
        name = f"{LINEAR}.{suffix}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = (tensor(tensors[name]) if callable(tensor) else tensor).contiguous()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_floats_that_the_integers_stand_for(
    name: str, kernels: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setattr(codes, "native_kernels", lambda: "no compiled kernel")
    stored, floats = tmp_path / "stored", tmp_path / "floats"
    quantize(checkpoint, stored, name, dequantized=floats)
    found, expected = loaded(stored), loaded(floats)
    assert list(found) == list(expected)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    for dtype in (torch.bfloat16, torch.float16):
        half = loaded(stored, dtype)
        assert all(torch.equal(half[key], expected[key].to(dtype)) for key in expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", ["pack-4-asymmetric", "gptq-4-act-order", "gptq-v2"])
def test_bits_and_whole_rows(name: str, bits: int, checkpoint: Path, tmp_path: Path) -> None:
    for group in (0, 16):
        stored, floats = tmp_path / f"stored-{group}", tmp_path / f"floats-{group}"
        options: Options = FORMATS[name].options._replace(bits=bits, group=group)
        quantize(checkpoint, stored, name, dequantized=floats, options=options)
        expected = loaded(floats)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded(stored).items())


@pytest.mark.parametrize("name", ["int8", "pack-4-asymmetric", "gptq-4-act-order", "awq", "fp8-blocks"])
def test_greedy_tokens_are_those_of_the_floats(
    name: str, checkpoint: Path, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    stored, floats = tmp_path / "stored", tmp_path / "floats"
    quantize(checkpoint, stored, name, dequantized=floats)
    found, expected = (
        [serve(folder).ask(text).tokens for text in ("Tokens", "A layer runs")] for folder in (stored, floats)
    )
    assert found == expected
    assert found != [serve(checkpoint).ask(text).tokens for text in ("Tokens", "A layer runs")]


@pytest.mark.parametrize(
    ("name", "bytes_of_group"), [("pack-4", 0), ("pack-4-asymmetric", 2), ("awq", 4), ("gptq-4-act-order", 4)]
)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_plan_counts_the_memory_of_what_is_made(
    name: str, bytes_of_group: int, has_kernels: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(kv_size, "native_kernels", lambda: "no compiled kernel")
    quantize(checkpoint, tmp_path, name)
    region = fill_region(tmp_path)
    try:
        config, index = read_config(region.file, region.wait_index()), region.wait_index()
        limited = replace(SETTINGS, memory_limit_mb=1)
        shapes = [(64, 64)] * 2 + [(32, 64)] * 2 + [(128, 64)] * 2 + [(64, 128)]
        values = 4 * sum(rows * columns for rows, columns in shapes)
        made = 4 * values
        if has_kernels:
            made = 4 * sum(rows * columns // 32 for rows, columns in shapes) * bytes_of_group
            made += values // 2 if name in ("awq", "gptq-4-act-order") else 0
        stored = sum(shard.data_bytes for shard in index.shards)
        applier = config.model().applier(torch.float32)
        free = free_bytes(region, applier.tensors(region).wait_index(), limited, torch.float32, applier)
        assert free == (1 << 20) - stored - made
        assert sorted(profile(region, SETTINGS).order) == sorted(index.tensors)
    finally:
        region.close()


@pytest.mark.parametrize("name", ["gptq-4-act-order", "awq"])
def test_the_recorded_order_is_that_of_the_floats(name: str, checkpoint: Path, tmp_path: Path) -> None:
    quantize(checkpoint, tmp_path / "stored", name, dequantized=tmp_path / "floats")
    orders = []
    for folder in (tmp_path / "stored", tmp_path / "floats"):
        region = fill_region(folder)
        orders.append(list(dict.fromkeys(each.rpartition(".")[0] for each in profile(region, SETTINGS).order)))
        region.close()
    assert orders[0] == orders[1]


def test_experts_of_transformers_modules_stay_quantized(tmp_path: Path) -> None:
    if isinstance(codes.native_kernels(), str):
        pytest.skip("no compiled kernels")
    transformers = pytest.importorskip("transformers")
    config = transformers.OlmoeConfig(**GATED, num_experts=4, num_experts_per_tok=2)
    transformers.OlmoeForCausalLM(config).save_pretrained(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "stored", "pack-4")
    region = fill_region(tmp_path / "stored")
    read = read_config(region.file, region.wait_index())
    model = read.model()
    applier = model.applier(torch.float32)
    limited = replace(SETTINGS, memory_limit_mb=64)
    before = free_bytes(region, applier.tensors(region).wait_index(), limited, torch.float32, applier)
    with Loader(region, applier) as loader:
        loader.wait()
    experts = [weight for name, weight in model.named_parameters() if "experts" in name]
    assert len(experts) == 2 * 4 * 3
    assert {type(weight) for weight in experts} == {QuantizedParameter}
    assert before == (64 << 20) - sum(shard.data_bytes for shard in region.wait_index().shards)
    region.close()


@pytest.mark.parametrize("block", [(1 << 64, 1 << 64), (8, 1 << 64), (8, 1 << 63), (1 << 40, 40)])
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_a_block_may_be_larger_than_the_weight(
    kernels: str, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of config.json beyond those of C would end this process."""
    if kernels == "torch":
        monkeypatch.setattr(codes, "native_kernels", lambda: "no compiled kernel")
    weight = torch.randint(-128, 128, (8, 40)).char()
    stored = QuantizedWeight("m", Scheme(layout="direct", bits=8, block=block), (8, 40), {})
    made = stored.codes({"weight": weight, "weight_scale": torch.full((1, 1), 0.5)})
    assert torch.equal(made.dequantize(torch.float32), weight * 0.5)


@pytest.mark.parametrize(
    ("layout", "bits", "columns", "stays"),
    [("direct", 6, 40, True), ("pack", 2, 32, False), ("gptq", 8, 40, True), ("gptq", 8, 36, False)],
)
def test_only_what_kernels_take_is_planned_to_stay(layout: str, bits: int, columns: int, stays: bool) -> None:
    stored = QuantizedWeight("m", Scheme(layout=layout, bits=bits), (32, columns), {})
    words = torch.zeros(columns * bits // 32, 32, dtype=torch.int32)
    tensors = {
        "direct": {"weight": torch.zeros(32, columns).char(), "weight_scale": torch.ones(1, 1)},
        "pack": {"weight_packed": torch.zeros(32, 2, dtype=torch.int32), "weight_scale": torch.ones(32, 1)},
        "gptq": {"qweight": words, "scales": torch.ones(1, 32), "qzeros": torch.zeros(1, 8, dtype=torch.int32)},
    }
    assert stored.can_stay is stays
    if not isinstance(codes.native_kernels(), str):
        assert (stored.codes(tensors[layout]).kept(torch.float32) is not None) is stays


def test_a_group_index_is_used_as_it_was_checked() -> None:
    """A local checkpoint's file can change at any time, and a kernel reads the scales at these places unchecked."""
    index = torch.tensor([1, 0, 1, 0])
    scheme = Scheme(bits=4, layout="gptq")
    stored = QuantizedWeight("m", scheme, (8, 4), {})
    found = _group_of(stored, index, "g_idx", 2)
    index.fill_(1 << 40)
    assert found is not None
    assert found.tolist() == [1, 0, 1, 0]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no scale": (
        "int8",
        {"weight_scale": None},
        r"expected the tensors weight, weight_scale, found no weight_scale",
    ),
    "a scale of another length": (
        "int8",
        {"weight_scale": torch.ones(63, 1)},
        r"weight_scale: expected .*\[64, 1\].*found \[63, 1\]",
    ),
    "integers as scale": (
        "int8",
        {"weight_scale": lambda t: t.int()},
        "weight_scale: expected .*F32.*, found I32",
    ),
    "no zero points": (
        "pack-4-asymmetric",
        {"weight_zero_point": None},
        "weight_zero_point: expected zero points",
    ),
    "another shape": (
        "pack-4",
        {"weight_shape": torch.tensor([64, 120])},
        r"weight_shape: expected \[64, 128\], found \[64, 120\]",
    ),
    "too few words": (
        "pack-4",
        {"weight_packed": lambda t: t[:, :-1]},
        "weight_packed: expected columns in whole groups of 32, found 120",
    ),
    "floats as words": (
        "gptq-4",
        {"qweight": lambda t: t.float()},
        "qweight: expected I32, found F32",
    ),
    "zero points of another shape": (
        "awq",
        {"qzeros": lambda t: t[:-1]},
        r"qzeros: expected \[4, 8\], found \[3, 8\]",
    ),
    "a group that is not there": (
        "gptq-4-act-order",
        {"g_idx": lambda t: t + 1},
        "g_idx: expected groups from 0 to 3, found 1 to 4",
    ),
    "short group index": (
        "gptq-4",
        {"g_idx": lambda t: t[1:]},
        r"g_idx: expected \[128\], found \[127\]",
    ),
    "stored twice": (
        "gptq-4",
        {"weight": torch.ones(64, 128)},
        "expected qweight or weight, found both",
    ),
    "another format": (
        "gptq-4",
        {"weight_packed": torch.ones(64, 16).int()},
        "expected qweight by config.json, found weight_packed",
    ),
    "a group index for blocks": (
        "fp8-blocks",
        {"weight_g_idx": torch.zeros(128).int()},
        "weight_g_idx: expected no such tensor beside scales of blocks, found one",
    ),
    "too few blocks": (
        "fp8-blocks",
        {"weight_scale_inv": lambda t: t[:, 1:]},
        r"weight_scale_inv: expected \[2, 4\], found \[2, 3\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named(case: str, checkpoint: Path, tmp_path: Path) -> None:
    name, changes, said = REFUSED[case]
    quantize(checkpoint, tmp_path, name)
    change(tmp_path, **changes)
    with pytest.raises(MismatchError, match=LINEAR.replace(".", r"\.") + ".*" + said):
        loaded(tmp_path)


def test_a_weight_that_config_json_leaves_out_is_not_quantized(checkpoint: Path, tmp_path: Path) -> None:
    quantize(checkpoint, tmp_path, "pack-4")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", f"re:.*{LINEAR[-9:]}$"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = r"down_proj: expected a weight that is not quantized by config\.json, found weight_packed"
    with pytest.raises(MismatchError, match=said):
        loaded(tmp_path)


def test_tensors_that_only_quantize_what_is_computed_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    quantize(checkpoint, tmp_path, "int8")
    before = loaded(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {f"{LINEAR}.input_scale": torch.ones(1)}
    save_file(tensors | {"model.layers.0.self_attn.k_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded(tmp_path).items())


def test_biases_of_layers_without_any_are_left_out_of_gptq(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("gptq-4", "awq"):
        folder = tmp_path / name
        quantize(checkpoint, folder, name)
        tensors = load_file(folder / "model.safetensors") | {f"{LINEAR}.bias": torch.zeros(64)}
        save_file(tensors, folder / "model.safetensors")
    assert len(loaded(tmp_path / "gptq-4")) == len(loaded(checkpoint))
    with pytest.raises(MismatchError, match=r"1 not expected: model\.layers\.1\.mlp\.down_proj\.bias"):
        loaded(tmp_path / "awq")


def test_a_part_of_a_model_takes_its_own_quantized_layers(checkpoint: Path, tmp_path: Path) -> None:
    stored, floats = tmp_path / "stored", tmp_path / "floats"
    quantize(checkpoint, stored, "awq", dequantized=floats)
    region, expected = fill_region(stored), loaded(floats)
    config = read_config(region.file, region.wait_index())
    model = config.model()
    for rest in (False, True):
        applier = PartApplier(
            model, lambda name: ".1." in name, dtype=config.dtype, quantization=config.quantization, rest=rest
        )
        with Loader(region, applier) as loader:
            loader.wait()
        there = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
        assert len(there) == (len(expected) if rest else 9)
        assert all(torch.equal(parameter, expected[name]) for name, parameter in there.items())
    region.close()


def test_a_gpu_is_refused(checkpoint: Path, tmp_path: Path, serve_region: Callable[..., Served]) -> None:
    quantize(checkpoint, tmp_path, "awq")
    region = fill_region(tmp_path)
    with pytest.raises(ModelError, match=r"quantized \(awq, 4 bits\).*expected --device cpu, or --engine vllm"):
        serve_region(region, object())
    region.close()


def test_a_mixture_is_refused_on_a_gpu(tmp_path: Path, serve_region: Callable[..., Served]) -> None:
    transformers = pytest.importorskip("transformers")
    shape = GATED | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape)).save_pretrained(tmp_path)
    region = fill_region(tmp_path)
    with pytest.raises(ModelError, match=r"Qwen3MoeForCausalLM has experts.*expected --device cpu, or --engine vllm"):
        serve_region(region, object())
    region.close()


def test_modules_may_have_schemes_of_their_own(checkpoint: Path, tmp_path: Path) -> None:
    parts = {name: tmp_path / name for name in ("pack-4", "pack-8", "floats-4", "floats-8")}
    for bits in (4, 8):
        quantize(checkpoint, parts[f"pack-{bits}"], f"pack-{bits}", dequantized=parts[f"floats-{bits}"])
    stored = {name: load_file(folder / "model.safetensors") for name, folder in parts.items()}
    four, eight = ({n: t for n, t in stored[f"pack-{b}"].items() if ("mlp" in n) is (b == 4)} for b in (4, 8))
    save_file(four | eight, parts["pack-4"] / "model.safetensors")
    config = json.loads((parts["pack-4"] / "config.json").read_text())
    other = json.loads((parts["pack-8"] / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = other | {"targets": [r"re:.*self_attn\..*"]}
    (parts["pack-4"] / "config.json").write_text(json.dumps(config))
    found, expected = loaded(parts["pack-4"]), {b: loaded(parts[f"floats-{b}"]) for b in (4, 8)}
    assert all(torch.equal(tensor, expected[4 if "mlp" in name else 8][name]) for name, tensor in found.items())


def compressed(**weights: Any) -> dict[str, Any]:
    config = FORMATS["pack-4"].config(FORMATS["pack-4"].options)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "expected quant_method to be compressed-tensors.*awq"),
        ({"quant_method": "nvfp4"}, "found 'nvfp4'"),
        ({"bits": 4}, "expected quant_method to be .* or --engine vllm, found nothing"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "expected bits to be 2 or 4 or 8 .*found 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "expected group_size to be a positive number"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "found 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "expected version to be gemm"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "expected weight_block_size to be two positive numbers"),
        (compressed() | {"format": "nvfp4-pack-quantized"}, "expected format to be int-quantized, .*found 'nvfp4"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "expected sparsity_config to be absent"),
        (compressed() | {"ignore": ["re:("]}, 'expected a regular expression, found "re:\\('),
        (compressed() | {"config_groups": {}}, "expected config_groups to be groups of modules"),
        (compressed(num_bits=3), "expected num_bits to be 2 or 4 or 8"),
        (compressed(strategy="tensor_group"), "expected strategy to be tensor or channel or group or block"),
        ([1], "expected quantization_config to be an object"),
    ],
)  # fmt: skip
def test_what_config_json_may_say(raw: Any, said: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=f"config.json: .*{said}"):
        Quantization.of({"quantization_config": raw})


@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_computes_what_torch_does(transposed: bool) -> None:
    """For rows that are longer than what it takes at a time, and groups that end inside."""
    torch.manual_seed(3)
    stored = torch.randint(-128, 128, (70, 2400)).to(torch.int8)
    scale, zero = torch.rand(70, 8), torch.randint(-9, 9, (70, 8))
    group_of = torch.randint(0, 8, (2400,))
    cases = [
        {"scale": scale, "zero": zero},
        {"scale": scale, "group_of": group_of},
        {"scale": torch.rand(3, 24), "block": (32, 101)},
        {"scale": torch.rand(1, 1), "zero": torch.ones(1, 1)},
    ]
    if transposed:
        stored = stored.t().contiguous()
        cases = [
            {"scale": scale.t()[:8, :], "zero": zero.t()},
            {"scale": scale.t(), "zero": zero.t(), "group_of": group_of},
            {"scale": torch.rand(1, 70)},
        ]
    for case in cases:
        given = codes.Codes(stored, transposed=transposed, **case)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found = given.dequantize(dtype)
            expected = torch.empty_like(found)
            given._by_torch(expected)
            assert torch.equal(found, expected)


def test_words_hold_their_integers_where_the_formats_say() -> None:
    columns = torch.tensor([[0x76543210]], dtype=torch.int32)  # GPTQ and compressed-tensors: the first is the lowest
    assert unpack.across(columns, 4).tolist() == [list(range(8))]
    assert unpack.down(columns, 4).flatten().tolist() == list(range(8))
    assert unpack.interleaved(torch.tensor([[0x75316420]], dtype=torch.int32), 4).tolist() == [list(range(8))]
    assert unpack.across(torch.tensor([[-0x7F7F7F80]], dtype=torch.int32), 8).tolist() == [[0x80] * 4]
    assert unpack.down(torch.tensor([[0b11100100]], dtype=torch.int32), 2)[:4].flatten().tolist() == [0, 1, 2, 3]


SHAPE = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = SHAPE | {"intermediate_size": 96, "max_position_embeddings": 64, "num_key_value_heads": 2}
LATENT = GATED | {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "topk_group": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape", "name"),
    [
        ("Olmoe", GATED | {"num_experts": 4, "num_experts_per_tok": 2}, "pack-4"),
        ("Qwen3Moe", GATED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "pack-4"),
        pytest.param("DeepseekV3", LATENT, "fp8-blocks", marks=pytest.mark.slow),
        pytest.param("Gemma", GATED | {"head_dim": 16}, "gptq-4", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_transformers_has_saved_may_be_quantized(
    kind: str, shape: dict[str, Any], name: str, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**shape, initializer_range=0.3)
    plain, stored, floats = tmp_path / "plain", tmp_path / "stored", tmp_path / "floats"
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(plain)
    quantize(plain, stored, name, dequantized=floats)
    tensors = load_file(stored / "model.safetensors")
    quantized = {name for name, tensor in tensors.items() if tensor.dtype in (torch.int32, torch.float8_e4m3fn)}
    assert any("self_attn" in name for name in quantized)
    assert any("experts.1" in name for name in quantized) is (kind != "Gemma")
    answers = [serve(folder, max_concurrency=2).ask([5, 17, 2, 88], max_tokens=8).tokens for folder in (stored, floats)]
    assert answers[0] == answers[1]


def test_an_encoder_may_be_quantized(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from medusa_runtime.engine.encoder.text_encoder import Encoder, EncoderOptions, Tokens
    from medusa_runtime.timeline import Timeline

    torch.manual_seed(5)
    plain, stored, floats = tmp_path / "plain", tmp_path / "stored", tmp_path / "floats"
    transformers.BertModel(transformers.BertConfig(**SHAPE, intermediate_size=96)).save_pretrained(plain)
    (plain / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    quantize(plain, stored, "int8", dequantized=floats)
    assert any(tensor.dtype is torch.int8 for tensor in load_file(stored / "model.safetensors").values())
    found = []
    for folder in (stored, floats):
        region = fill_region(folder)
        encoder = Encoder(region, Timeline.create("test"), EncoderOptions(torch.float32))
        with torch.inference_mode():
            found.append(encoder.encode([Tokens([5, 17, 2, 88])])[0])
        encoder.close()
        region.close()
    assert torch.equal(*found)
