"""Log-probabilities of prompts: those of transformers, whatever the chunks and the company."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.engine import frames
from medusa_runtime.engine.base import Delta, GenerateRequest, PromptLogprobs, SamplingParams
from medusa_runtime.engine.client import EngineClient
from medusa_runtime.engine.server import EngineServer
from medusa_runtime.engine.serving import prompt_scores
from medusa_runtime.engine.torch import prompt_scoring
from medusa_runtime.errors import ContextLengthError, EngineError, RequestError

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


def scores(served: Any, prompt: str | list[int], count: int) -> PromptLogprobs:
    """Return a prompt's scores with their texts, as they are sent."""
    found = served.ask(prompt, prompt_logprobs=count, max_tokens=0).wait().deltas[0].prompt_logprobs
    with_texts: PromptLogprobs = served.engine.with_texts(found)
    return with_texts


def test_texts_are_whole_characters_and_add_up_to_the_prompt(serve: Any) -> None:
    served = serve()
    for prompt in PROMPTS:
        assert "".join(token.text for token in scores(served, prompt, 1).tokens()) == "<s>" + prompt


def test_texts_are_the_same_whatever_is_decoded_together(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    texts = served.engine._tokenizer.texts
    ids = served.engine.tokenize("é日本😀" * 4, True) + [random.Random(1).randrange(320) for _ in range(60)]
    found = scores(served, ids, 20)
    before = {place: ids[max(place // 21 - 3, 0) : place // 21 + 1] for place in range(len(found.token_ids))}
    expected = [texts.after(before[place], [token])[token] for place, token in enumerate(found.token_ids)]
    assert len(found.texts_here) > 20
    for most in (1, 7, 1 << 20):
        monkeypatch.setattr(prompt_scores, "_MOST_PAIRS", most)
        again = served.engine.with_texts(found._replace(texts={}, texts_here={}))
        assert again == found
        assert [again._text(place) for place in before] == expected


@contextmanager
def connected(served: Any, folder: Path) -> Iterator[EngineClient]:
    """Return a client of the engine behind a socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "engine"))
        listener.listen()
        server = EngineServer(listener, served.engine)
        server.start()
        client = EngineClient(listener.getsockname())
        try:
            yield client
        finally:
            client.close()
            server.close()


def test_other_requests_go_on_while_texts_are_made(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make the texts of a long prompt takes seconds. Later deltas of the same request come behind them."""
    served = serve()
    expected = scores(served, PROMPTS[3], 3)
    go_on, asked = threading.Event(), threading.Event()
    token_texts = served.engine._tokenizer.texts
    decode_each = token_texts._decode_each

    def wait(sequences: list[list[int]]) -> list[str]:
        asked.set()
        assert go_on.wait(60)
        texts: list[str] = decode_each(sequences)
        return texts

    monkeypatch.setattr(token_texts, "_decode_each", wait)
    params = SamplingParams(prompt_logprobs=3, max_tokens=20, temperature=0, ignore_eos=True)
    with connected(served, tmp_path) as client:
        try:
            scored = client.generate(GenerateRequest("scored", PROMPTS[3], params))
            assert asked.wait(60)
            others = client.generate(GenerateRequest("other", "A", replace(params, prompt_logprobs=None)))
            assert len([token for delta in others for token in delta.token_ids]) == 20
            assert scored.get(0.05) is None
            go_on.set()
            first, *following = list(scored)
        finally:
            go_on.set()
    assert first.prompt_logprobs is not None
    assert list(first.prompt_logprobs.tokens()) == list(expected.tokens())
    assert [delta.completion_tokens for delta in (first, *following)] == list(range(1, 21))


def test_a_request_whose_texts_cannot_be_made_ends_with_an_error(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()

    def fail(sequences: list[list[int]]) -> list[str]:
        raise RuntimeError("no text")

    monkeypatch.setattr(served.engine._tokenizer.texts, "_decode_each", fail)
    with connected(served, tmp_path) as client:
        params = SamplingParams(prompt_logprobs=3, max_tokens=400, temperature=0, ignore_eos=True)
        with pytest.raises(EngineError, match="the texts of the prompt's tokens could not be made: no text"):
            list(client.generate(GenerateRequest("scored", PROMPTS[3], params)))
        plain = GenerateRequest("other", "A", SamplingParams(max_tokens=3))
        assert list(client.generate(plain))


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
    served = serve()
    delta = served.ask(PROMPTS[3], prompt_logprobs=2).wait().deltas[0]
    delta = delta._replace(prompt_logprobs=served.engine.with_texts(delta.prompt_logprobs))
    assert delta.prompt_logprobs.texts_here
    assert frames.delta_from_frame(frames.unpack(frames.pack(frames.delta_to_frame(delta))[4:])) == delta
    plain = Delta("a", "b", (1,))
    assert frames.delta_from_frame(frames.unpack(frames.pack(frames.delta_to_frame(plain))[4:])) == plain
