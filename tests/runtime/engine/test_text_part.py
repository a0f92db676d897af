"""Models that also take pictures: transformers' tokens for text, from their decoders alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_fixtures import SETTINGS, Served
from medusa_runtime.config import Settings
from medusa_runtime.models.backend import backend, verify

pytest.importorskip("transformers")
from reference_models import loaded, logits
from text_parts import CASES, by_transformers, flat, write

PROMPTS = ([5, 17, 2, 88, 41, 41, 9, 60, 3, 71, 12, 33, 90, 7, 54, 29], [8, 30, 77], [64, 4, 21] * 9)
ASKED = {"max_tokens": 10, "logit_bias": {2: -100.0}}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path, serve: Callable[..., Served]) -> None:
    model = write(case, tmp_path)
    expected = [by_transformers(model, prompt, 10) for prompt in PROMPTS]
    served = serve(tmp_path, max_batched_tokens=max(12, SETTINGS.max_concurrency))  # prompts come in chunks
    answers = [served.ask(list(prompt), **ASKED) for prompt in PROMPTS]
    assert [answer.tokens for answer in answers] == expected


@pytest.mark.parametrize("case", ["gemma3", "qwen3-vl", "qwen3-vl-moe", "mistral3"])
def test_agrees_in_bf16(case: str, tmp_path: Path) -> None:
    """As near to the exact logits as transformers is, when both compute in bf16."""
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
