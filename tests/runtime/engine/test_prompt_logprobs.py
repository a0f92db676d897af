"""Log-probabilities of prompts: those of transformers, whatever the chunks and the company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.engine import frames
from medusa_runtime.engine.base import Delta, PromptLogprobs
from medusa_runtime.engine.torch import prompt_scoring
from medusa_runtime.errors import ContextLengthError, RequestError

PROMPTS = (
    "Tokens flow from storage",
    "A",
    "to memory, and from memory to layers. " * 4,
    "日本語 😀🚀 naïve",
    "çà et là",
)


def expected(folder: Path, ids: list[int]) -> Any:
    """Return the log-probabilities [tokens - 1, vocab] that transformers gives to what follows each token."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1)


def check(found: PromptLogprobs | None, ids: list[int], reference: Any, count: int) -> None:
    assert found is not None
    first, *others = found.tokens()
    assert (first.token_id, first.logprob, first.top) == (ids[0], None, ())
    assert [token.token_id for token in others] == ids[1:]
    for token, rank, row in zip(others, found.ranks, reference, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-4)
        values, best = row.topk(count)
        assert [value for _, _, value in token.top] == pytest.approx(values.tolist(), abs=2e-4)
        assert [number for number, _, _ in token.top] == best.tolist()
        assert rank == int((row >= row[token.token_id]).sum())


@pytest.mark.parametrize("settings", [{}, {"max_batched_tokens": 7}, {"max_batched_tokens": 64, "max_concurrency": 2}])
def test_they_are_those_of_transformers(serve: Any, checkpoint: Path, settings: dict[str, int]) -> None:
    served = serve(**settings)
    company = served.ask("A", max_tokens=60)
    answers = {prompt: served.ask(prompt, prompt_logprobs=3, max_tokens=2) for prompt in PROMPTS}
    for prompt, answer in answers.items():
        ids = served.engine.tokenize(prompt, True)
        first, *others = answer.wait().deltas
        check(first.prompt_logprobs, ids, expected(checkpoint, ids), 3)
        assert all(delta.prompt_logprobs is None for delta in others)
        assert answer.tokens == served.ask(prompt, max_tokens=2).tokens
    assert company.last.prompt_logprobs is None


def test_few_logits_are_in_memory_at_once(serve: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scoring, "_MOST_LOGITS", 320 * 5)
    served = serve()
    sizes: list[int] = []
    of = served.engine._model.logits
    monkeypatch.setattr(served.engine._model, "logits", lambda hidden: sizes.append(len(hidden)) or of(hidden))
    answer = served.ask(PROMPTS[2], prompt_logprobs=1)
    ids = served.engine.tokenize(PROMPTS[2], True)
    check(answer.wait().deltas[0].prompt_logprobs, ids, expected(checkpoint, ids), 1)
    assert max(sizes) == 5


def test_a_preempted_prompt_is_scored_once(serve: Any, checkpoint: Path) -> None:
    served = serve(kv_cache_mb=1, max_batched_tokens=16)  # 1024 tokens
    text = PROMPTS[2] * 3
    ids = served.engine.tokenize(text, True)[:200]
    answers = [served.ask(ids, prompt_logprobs=0, max_tokens=160) for _ in range(8)]
    reference = expected(checkpoint, ids)
    for answer in answers:
        check(answer.wait().deltas[0].prompt_logprobs, ids, reference, 0)
    assert served.engine.stats()["preemptions_total"] > 0


def test_a_prompt_alone_is_scored_without_a_token_and_may_fill_the_context(serve: Any, checkpoint: Path) -> None:
    served = serve(max_model_len=48)
    ids = served.engine.tokenize(PROMPTS[2] * 2, True)[:48]
    answer = served.ask(ids, prompt_logprobs=2, max_tokens=0, logprobs=1)
    (delta,) = answer.wait().deltas
    check(delta.prompt_logprobs, ids, expected(checkpoint, ids), 2)
    assert (delta.finish_reason, delta.token_ids, delta.text, delta.logprobs) == ("length", (), "", ())
    assert (delta.prompt_tokens, delta.completion_tokens) == (48, 0)
    assert served.engine.stats()["generated_tokens_total"] == 0
    assert served.engine.stats()["kv_tokens_used"] == 0
    with pytest.raises(ContextLengthError, match="the prompt has 48, which leaves no room"):
        served.ask(ids, max_tokens=1)
    with pytest.raises(ContextLengthError, match="the prompt has 49, which is more"):
        served.ask([*ids, 3], max_tokens=0)


def test_texts_are_whole_characters_and_add_up_to_the_prompt(serve: Any) -> None:
    served = serve()
    for prompt in PROMPTS:
        found = served.ask(prompt, prompt_logprobs=1, max_tokens=0).wait().deltas[0].prompt_logprobs
        assert "".join(token.text for token in found.tokens()) == "<s>" + prompt


def test_bad_counts_are_refused(serve: Any) -> None:
    served = serve()
    for count in (-1, 21, True, 1.5, "1"):
        with pytest.raises(RequestError, match="prompt_logprobs: expected between 0 and 20, found"):
            served.ask("A", prompt_logprobs=count)


def test_a_long_prompt_gets_fewer_alternatives(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_runtime.engine.serving import validation

    monkeypatch.setattr(validation, "_MOST_PROMPT_LOGPROBS", 30)
    with pytest.raises(RequestError, match="prompt_logprobs: expected at most 2 for a prompt of 10 tokens, found 3"):
        serve().ask([5] * 10, prompt_logprobs=3)


def test_they_cross_the_socket(serve: Any) -> None:
    delta = serve().ask(PROMPTS[3], prompt_logprobs=2).wait().deltas[0]
    assert frames.delta_from_frame(frames.unpack(frames.pack(frames.delta_to_frame(delta))[4:])) == delta
    plain = Delta("a", "b", (1,))
    assert frames.delta_from_frame(frames.unpack(frames.pack(frames.delta_to_frame(plain))[4:])) == plain
