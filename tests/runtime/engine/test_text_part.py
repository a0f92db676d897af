"""Models that also take pictures: transformers' tokens for text, from their decoders alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_fixtures import merge, write_adapter
from engine_fixtures import SETTINGS, Answer, Served
from fetching import fetch_into
from medusa_runtime.checkpoint.text_names import text_name
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.models.backend import backend, verify
from medusa_runtime.region.reader import Region
from safetensors.torch import load_file, save_file

from benchmarks.quantize import quantize

pytest.importorskip("transformers")
from reference_models import loaded, logits
from text_parts import CASES, by_transformers, flat, write

PROMPTS = ((5, 17, 2, 88, 41, 41, 9, 60, 3, 71, 12, 33, 90, 7, 54, 29), (8, 30, 77), (64, 4, 21) * 9)
ASKED: dict[str, Any] = {"max_tokens": 10, "logit_bias": {2: -100.0}}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path, serve: Callable[..., Served]) -> None:
    model = write(case, tmp_path)
    expected = [by_transformers(model, list(prompt), 10) for prompt in PROMPTS]
    served = serve(tmp_path, max_batched_tokens=max(12, SETTINGS.max_concurrency))  # prompts come in chunks
    answers = [served.ask(list(prompt), **ASKED) for prompt in PROMPTS]
    assert [answer.tokens for answer in answers] == expected


@pytest.mark.parametrize("case", ["gemma3", "qwen3-vl", "qwen3-vl-moe", "mistral3"])
def test_agrees_in_bf16(case: str, tmp_path: Path) -> None:
    """In bf16, the logits are as near to the exact ones as those of transformers."""
    theirs, ids = write(case, tmp_path, torch.bfloat16), torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        with loaded(tmp_path) as ours:
            assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
            found, rounded = logits(ours, list(PROMPTS[0])).float(), theirs(input_ids=ids).logits[0].float()
        exact = theirs.float()(input_ids=ids).logits[0]
    assert (found - exact).abs().mean() <= 1.5 * (rounded - exact).abs().mean()


def test_shards_and_a_file_with_the_decoders_keys_at_the_top(tmp_path: Path, serve: Callable[..., Served]) -> None:
    model = write("qwen2.5-vl", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    flat(tmp_path)
    served = serve(tmp_path)
    assert served.ask(list(PROMPTS[0]), **ASKED).tokens == by_transformers(model, list(PROMPTS[0]), 10)


def test_what_is_served_is_said(tmp_path: Path) -> None:
    write("mistral3", tmp_path)

    def read(name: str) -> bytes | None:
        return (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None

    said = "the torch engine, as MistralForCausalLM; text only (for pictures or sound use --engine vllm)"
    assert str(backend(read, Settings())) == str(verify(read, Settings())) == said
    assert backend(read, Settings(engine="vllm")).architecture == "Mistral3ForConditionalGeneration"


@pytest.mark.parametrize(("case", "form"), [("mistral3", "int8"), ("ministral3", "fp8-blocks"), ("qwen3-vl", "pack-8")])
def test_weights_of_the_text_part_may_be_quantized(
    case: str, form: str, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    """Tools that quantize leave what takes pictures as it is, and name it in a list of ignored parts."""
    write(case, tmp_path / "whole")
    stored, floats = tmp_path / "stored", tmp_path / "floats"
    quantize(tmp_path / "whole", stored, form, dequantized=floats)
    for folder in (stored, floats):
        weights = load_file(folder / "model.safetensors")
        eyes = {name: value for name, value in load_file(tmp_path / "whole" / "model.safetensors").items()
                if text_name(name) is None}  # fmt: skip
        left = {name: value for name, value in weights.items() if text_name(name) is not None}
        save_file(left | eyes, folder / "model.safetensors")
    raw = json.loads((stored / "config.json").read_text())
    modules = sorted({name.removesuffix(".weight") for name in eyes})
    raw["quantization_config"] |= {"ignore": [*modules, "re:.*lm_head"], "modules_to_not_convert": modules}
    (stored / "config.json").write_text(json.dumps(raw))
    answers = [serve(folder, max_concurrency=2).ask(list(PROMPTS[0]), **ASKED).tokens for folder in (stored, floats)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("case", ["qwen2.5-vl", "qwen3-vl"])
def test_an_adapter_with_the_names_of_the_whole_model(case: str, tmp_path: Path, serve: Callable[..., Served]) -> None:
    write(case, tmp_path / "base")
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "base", targets=targets)
    merged = serve(merge(tmp_path / "merged", tmp_path / "base", adapter)).ask(list(PROMPTS[0]), **ASKED).tokens
    served = serve(tmp_path / "base")
    with closing(Region.create()) as region:
        fetch_into(region, str(adapter / "adapter_model.safetensors"))
        served.engine.add_adapter("one", region)
        served.engine.wait_adapter("one")
        answer = Answer("adapted")
        params = SamplingParams(temperature=0.0, ignore_eos=True, **ASKED)
        served.engine.add(GenerateRequest("adapted", PROMPTS[0], params, adapter="one"), answer.incoming.put)
        assert answer.tokens == merged != served.ask(list(PROMPTS[0]), **ASKED).tokens
