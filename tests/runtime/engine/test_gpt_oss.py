"""GPT-OSS with MXFP4 weights: transformers' tokens, experts that are waited for one by one, and what does not fit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import SETTINGS, Served, fill_region
from medusa_runtime.checkpoint.divided import DividedIndex, rows
from medusa_runtime.checkpoint.header import MOST_TENSORS
from medusa_runtime.checkpoint.index import Shard, TensorEntry, WeightIndex
from medusa_runtime.engine.checkpoint_files import read_config
from medusa_runtime.engine.torch.kv_size import free_bytes
from medusa_runtime.engine.torch.profile import profile
from medusa_runtime.errors import ConfigError, CorruptError, MismatchError, ModelError, WeightsError
from medusa_runtime.kernels.quantized import QuantizedParameter
from medusa_runtime.load.loader import Loader
from medusa_runtime.load.part_applier import PartApplier
from medusa_runtime.load.quantized import codes
from medusa_runtime.region.pages import address_of
from medusa_runtime.region.reader import Region
from safetensors.torch import load_file, save_file
from torch import Tensor
from waiting import until

from benchmarks.quantize import quantize

transformers = pytest.importorskip("transformers")
EXPERTS = "model.layers.1.mlp.experts"
SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 256, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": 6,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32,
        "truncate": False,
    },
}  # fmt: skip
PROMPTS = [list(range(5, 60)), [8, 30, 77], [41] * 20]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model as it is, with its experts in MXFP4, and with the floats that these stand for."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("plain", "stored", "floats")}
    torch.manual_seed(5)
    config = transformers.GptOssConfig(**SHAPE, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(found["plain"])
    quantize(found["plain"], found["stored"], "mxfp4", dequantized=found["floats"])
    return found


def by_transformers(folder: Path, prompt: list[int], count: int) -> list[int]:
    model = transformers.GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def changed(folder: Path, out: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """Copy a checkpoint with other tensors; None takes one away."""
    state = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor is None:
            del state[name]
        else:
            state[name] = (tensor(state[name]) if callable(tensor) else tensor).contiguous()
    save_file(state, out / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | (config or {})
    (out / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))
    return out


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    region = fill_region(folder)
    try:
        model = read_config(region.file, region.wait_index()).model()
        with Loader(region, model.applier(dtype)) as loader:
            loader.wait()
        return {name: parameter.clone() for name, parameter in model.named_parameters()}
    finally:
        region.close()


@pytest.mark.parametrize("form", ["stored", "plain"])
def test_greedy_tokens_are_those_of_transformers(
    form: str, folders: dict[str, Path], serve: Callable[..., Served]
) -> None:
    served = serve(folders[form], max_batched_tokens=12)  # prompts come in chunks, beside the tokens of others
    answers = [served.ask(prompt, max_tokens=16, logit_bias={2: -100.0}) for prompt in PROMPTS]
    floats = folders["floats" if form == "stored" else form]
    assert [answer.tokens for answer in answers] == [by_transformers(floats, prompt, 16) for prompt in PROMPTS]


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_weights_are_the_floats_that_mxfp4_stands_for(
    kernels: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setattr(codes, "native_kernels", lambda: "no compiled kernel")
    expected = loaded(folders["floats"])
    for dtype in (torch.float32, torch.bfloat16):
        found = loaded(folders["stored"], dtype)
        assert list(found) == list(expected)
        assert [name for name in expected if not torch.equal(found[name], expected[name].to(dtype))] == []


def test_experts_stay_where_they_lie_in_mxfp4(folders: dict[str, Path]) -> None:
    if isinstance(codes.native_kernels(), str):
        pytest.skip("no compiled kernels")
    region = fill_region(folders["stored"])
    model = read_config(region.file, region.wait_index()).model()
    with Loader(region, applier := model.applier(torch.float32)) as loader:
        loader.wait()
    entry = region.wait_index().tensors[f"{EXPERTS}.down_proj_blocks"]
    begin = address_of(region.shard(entry.shard)) + entry.start
    for number, expert in enumerate(model.layers[1].mlp.experts):
        weight = expert.down_proj.weight
        assert type(weight) is QuantizedParameter
        values, scale, *_ = weight.codes._tensors
        assert values.data_ptr() - begin == number * (entry.stop - entry.start) // 8
        assert scale.dtype is torch.float8_e8m0fnu
    stored = sum(shard.data_bytes for shard in region.wait_index().shards)
    index = applier.tensors(region).wait_index()
    limited = replace(SETTINGS, memory_limit_mb=8)
    assert free_bytes(region, index, limited, torch.float32, applier) == (8 << 20) - stored
    assert free_bytes(region, index, limited, torch.bfloat16, applier) < (8 << 20) - stored  # floats are copied
    region.close()


def test_the_recorded_order_names_the_tensors_of_the_checkpoint(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        region = fill_region(folder)
        found = profile(region, SETTINGS)
        assert sorted(found.order) == sorted(region.wait_index().tensors)
        layers = [name.split(".")[2] for name in found.order if ".layers." in name]
        assert layers == sorted(layers)
        region.close()


class Arriving:
    """A region whose bytes a test lets in, in small chunks."""

    def __init__(self, folder: Path) -> None:
        filled = fill_region(folder)
        self.index = filled.wait_index()
        self._shards = [bytes(filled.shard(number)) for number in range(len(self.index.shards))]
        filled.close()
        shards = [shard._replace(path=None, offset=0) for shard in self.index.shards]
        self.region = Region.create()
        self.writer = self.region.writer()
        files = {file.name: file.read_bytes() for file in folder.glob("*.json")}
        self.writer.lay_out(type(self.index)(shards, self.index.tensors), files, peer_chunk_bytes=1 << 10)
        self._left = set(range(self.writer.chunks.count))

    def let_in(self, entries: list[Any]) -> None:
        covering = self.writer.chunks.covering
        for chunk in self._left & {chunk for one in entries for chunk in covering(one.shard, one.start, one.stop)}:
            shard, start, stop = self.writer.chunks.shard_range(chunk)
            with self.writer.buffer(chunk) as buffer:
                buffer[:] = self._shards[shard][start:stop]
            self.writer.publish(chunk)
            self._left.remove(chunk)


@pytest.mark.parametrize("form", ["stored", "plain"])
def test_a_forward_waits_only_for_the_experts_that_it_uses(
    form: str, folders: dict[str, Path], serve: Any, serve_region: Any
) -> None:
    whole, used = serve(folders[form]), set[str]()
    for name, part in whole.engine._model.named_modules():
        if name.rpartition(".")[2].isdigit() and ".experts." in name:
            part.register_forward_hook(lambda *_, name=name: used.add(f"model.{name}."))
    expected = whole.ask([8, 30, 77], max_tokens=2).tokens
    assert 0 < len(used) < 4 * 8
    arriving = Arriving(folders[form])
    parts = DividedIndex(arriving.index, whole.engine._model.divide).tensors
    try:
        served = serve_region(arriving.region)
        answer = served.ask([8, 30, 77], max_tokens=2)
        until(lambda: served.engine.stats()["running"])
        arriving.let_in([entry for name, entry in parts.items() if ".experts." not in name])
        until(lambda: any(stage.name == "apply" for stage in served.timeline.stages()))
        assert answer.incoming.empty()
        arriving.let_in([entry for name, entry in parts.items() if name.startswith(tuple(used))])
        assert answer.tokens == expected
        assert not served.engine._loader.applied
        arriving.let_in(list(parts.values()))
        arriving.writer.finish()
    finally:
        arriving.writer.close()


@pytest.mark.parametrize("form", ["stored", "plain"])
def test_parts_that_are_copied_can_be_released(form: str, folders: dict[str, Path]) -> None:
    arriving, expected = Arriving(folders[form]), loaded(folders[form], torch.float16)
    arriving.let_in(list(arriving.index.tensors.values()))
    region = arriving.region
    model, full = read_config(region.file, region.wait_index()).model(), os.fstat(region.fd).st_blocks
    with Loader(region, model.applier(torch.float16), release=True) as loader:
        loader.wait()
    assert all(torch.equal(parameter + 0, expected[name] + 0) for name, parameter in model.named_parameters())
    if form == "plain":  # all of it is copied, as other floats
        assert (full - os.fstat(region.fd).st_blocks) * 512 > 0.9 * sum(s.data_bytes for s in arriving.index.shards)
    with pytest.raises(WeightsError, match=r"experts\.3\.down_proj\.bias was released"):
        region.has(f"{EXPERTS}.3.down_proj.bias")
    arriving.writer.close()
    region.close()


def test_a_part_with_the_name_of_another_tensor_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    twice = changed(folders["stored"], tmp_path, {f"{EXPERTS}.3.down_proj.bias": torch.zeros(64)})
    with pytest.raises(MismatchError, match=r"3\.down_proj\.bias: expected once, found as a part of .*down_proj_bias"):
        loaded(twice)


def test_too_many_parts_are_refused_before_all_are_made() -> None:
    made = 0

    def divide(name: str, entry: TensorEntry) -> dict[str, TensorEntry]:
        nonlocal made
        made += entry.shape[0]
        return rows(entry, (f"{name}.{at}" for at in range(entry.shape[0])))

    shard = Shard("a", 1 << 20, 0)
    whole = {f"t{at}": TensorEntry(0, at << 16, at + 1 << 16, "U8", (1 << 16,)) for at in range(16)}
    with pytest.raises(CorruptError, match=f"at most {MOST_TENSORS} tensors"):
        DividedIndex(WeightIndex([shard], whole), divide)
    assert made <= MOST_TENSORS + (1 << 16)


def test_a_worker_takes_its_own_layers(folders: dict[str, Path]) -> None:
    region, expected = fill_region(folders["stored"]), loaded(folders["floats"])
    config = read_config(region.file, region.wait_index())
    model = config.model()
    applier = PartApplier(
        model, lambda name: ".1." in name, dtype=torch.float32, quantization=config.quantization, divide=model.divide
    )
    with Loader(region, applier) as loader:
        loader.wait()
    there = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert {f"layers.1.mlp.experts.{number}.down_proj.weight" for number in range(8)} <= there.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in there.items())
    region.close()


# No tensor here is filled by torch's threads: the tests' workers are forked once this file has been imported.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": (
        {f"{EXPERTS}.down_proj_scales": None},
        "expected the tensors blocks, scales, found no scales",
    ),
    "scales of another shape": (
        {f"{EXPERTS}.down_proj_scales": lambda t: t[:, :, 1:]},
        r"experts\.down_proj_scales: expected \[8, 64, 3\], found \[8, 64, 2\]",
    ),
    "scales as floats": (
        {f"{EXPERTS}.down_proj_scales": lambda t: t.float()},
        r"down_proj\.scales: expected U8, found F32",
    ),
    "an expert too few": (
        {f"{EXPERTS}.gate_up_proj_blocks": lambda t: t[1:]},
        r"experts\.gate_up_proj_blocks: expected \[8, 192, 2, 16\], found \[7, 192, 2, 16\]",
    ),
    "blocks without a dimension": (
        {f"{EXPERTS}.gate_up_proj_blocks": lambda t: t.flatten(2)},
        r"gate_up_proj_blocks: expected \[8, 192, 2, 16\], found \[8, 192, 32\]",
    ),
    "no biases": (
        {f"{EXPERTS}.gate_up_proj_bias": None},
        r"8 missing: layers\.1\.mlp\.experts\.0\.gate_up_proj\.bias",
    ),
    "blocks and floats": (
        {f"{EXPERTS}.down_proj": torch.empty(8, 96, 64)},
        r"down_proj: expected blocks or weight, found both",
    ),
    "an unknown module": (
        {f"{EXPERTS}.other_proj_blocks": torch.zeros(8, 4, 2, 16, dtype=torch.uint8)},
        r"1 not expected: model\.layers\.1\.mlp\.experts\.other_proj_blocks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    tensors, said = REFUSED[case]
    with pytest.raises(MismatchError, match=said):
        loaded(changed(folders["stored"], tmp_path, tensors))


def test_blocks_without_their_config_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"experts\.0\.(gate_up|down)_proj\.blocks"):
        loaded(changed(folders["stored"], tmp_path, {}, {"quantization_config": "absent"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok to be at most the number of experts, 8"),
        ({"layer_types": ["sliding_attention"]}, "layer_types to be 4 times full_attention or sliding_attention"),
        ({"num_local_experts": 1 << 20}, "num_local_experts to be at most"),
        ({"swiglu_limit": 0}, "swiglu_limit to be a number above 0"),
    ],
)
def test_what_config_json_may_say(change: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(changed(folders["stored"], tmp_path, {}, change))


def test_a_gpu_is_refused(folders: dict[str, Path], serve_region: Callable[..., Served]) -> None:
    region = fill_region(folders["stored"])
    with pytest.raises(ModelError, match=r"GptOssForCausalLM has experts.*expected --device cpu, or --engine vllm"):
        serve_region(region, object())
    region.close()
