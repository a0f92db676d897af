"""Ropes with other frequencies for long sequences: what a sequence gets depends neither on its length nor on others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import SETTINGS, Served

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

ORIGINAL, TOKENS = 24, 6
SHORT, LONG = list(range(5, 14)), list(range(5, 50))
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
SCALES = {"short_mscale": 0.9, "long_mscale": 1.3}
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": None, "num_local_experts": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(params=["Phi3ForCausalLM", "PhimoeForCausalLM"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Any]:
    """Save a random model with both lists of factors; return transformers' with only those for one kind of length."""
    kind = getattr(transformers, request.param)

    def model(**chosen: Any) -> Any:
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL}
        config = kind.config_class(
            **SHAPE, original_max_position_embeddings=ORIGINAL, rope_parameters=rope | FACTORS | SCALES | chosen
        )
        return kind(config).eval()

    def write_model(only: str) -> Any:
        torch.manual_seed(3)
        both = model()
        with torch.no_grad():
            for name, parameter in both.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
        both.save_pretrained(tmp_path)
        given = FACTORS | SCALES
        one = model(
            **{f"{side}_{name}": given[f"{only}_{name}"] for side in ("short", "long") for name in ("factor", "mscale")}
        )
        one.load_state_dict(both.state_dict())
        return one

    return write_model


def expected(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def ask(served: Served, prompt: list[int], **options: Any) -> Any:
    return served.ask(prompt, max_tokens=TOKENS, logit_bias={2: -100.0}, **options)


def test_all_sequences_get_the_long_factors(
    write: Callable[[str], Any], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    """A short prompt beside a long one, whose own chunks are short at first, and both with what the cache has."""
    model = write("long")
    served = serve(tmp_path, max_batched_tokens=max(12, SETTINGS.max_concurrency))
    for cached in (False, True):
        answers = [ask(served, prompt) for prompt in (LONG, SHORT, LONG[:-1])]
        assert [answer.tokens for answer in answers] == [expected(model, one) for one in (LONG, SHORT, LONG[:-1])]
        assert bool(answers[0].last.cached_tokens) == cached


def test_a_short_longest_sequence_has_the_short_factors(
    write: Callable[[str], Any], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    model = write("short")
    served = serve(tmp_path, max_model_len=ORIGINAL)
    prompt = LONG[: ORIGINAL - TOKENS]
    assert ask(served, prompt).tokens == expected(model, prompt)


def test_log_probabilities_of_a_long_prompt_are_those_of_transformers(
    write: Callable[[str], Any], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    model = write("long")
    answer = ask(serve(tmp_path, max_batched_tokens=max(12, SETTINGS.max_concurrency)), LONG, prompt_logprobs=1)
    with torch.no_grad():
        reference = torch.log_softmax(model(torch.tensor([LONG])).logits[0, :-1].float(), -1)
    found = list(answer.wait().deltas[0].prompt_logprobs.tokens())[1:]
    for token, row in zip(found, reference, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-3)


def test_dynamic_scaling_leaves_a_sequence_as_it_is_alone(tmp_path: Path, serve: Callable[..., Served]) -> None:
    """It begins behind the longest sequence that a model may have, so prompts that begin alike share their keys."""
    kind = transformers.CohereForCausalLM
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    torch.manual_seed(5)
    model = kind(kind.config_class(**SHAPE, rope_parameters=rope)).eval()
    model.save_pretrained(tmp_path)
    served = serve(tmp_path, max_batched_tokens=max(12, SETTINGS.max_concurrency))
    for cached in (False, True):
        answers = [ask(served, prompt) for prompt in (LONG, SHORT)]
        assert [answer.tokens for answer in answers] == [expected(model, prompt) for prompt in (LONG, SHORT)]
        assert bool(answers[0].last.cached_tokens) == cached
