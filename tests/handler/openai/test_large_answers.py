"""What an answer keeps in memory until it is sent."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from medusa_handler.faults import ApiError
from medusa_handler.openai.answer import Envelope
from medusa_handler.openai.completion import CompletionFormatter
from medusa_handler.openai.generation_response import Answer, GenerationPlan
from medusa_handler.openai.responses.answer import ResponsePlan
from medusa_handler.openai.responses.output import Output
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams, TokenLogprob

TOP = tuple((number, "a", -1.0) for number in range(20))
TOKEN = Delta("r", "a", (1,), (TokenLogprob(1, "a", -1.0, TOP),), None, None, 1, 1)


def plan(streams: bool) -> GenerationPlan:
    request = GenerateRequest("r", "a", SamplingParams(logprobs=20))
    envelope = Envelope("cmpl-1", "m", CompletionFormatter(20))
    return GenerationPlan([request] * 2, envelope, 2, 2, streams, include_usage=False)


def test_a_stream_forgets_what_it_has_sent() -> None:
    answer = plan(streams=True).answer()
    for place in range(5):
        for number in (0, 1):
            [event] = answer.stream(number, TOKEN)
            [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
            assert choice["text"] == "a"
            assert choice["logprobs"]["text_offset"] == [place]
    assert not any(choice.logprobs or choice.text for choice in answer._choices)  # type: ignore[attr-defined]


def test_a_whole_answer_of_too_many_log_probabilities_is_refused() -> None:
    answer = plan(streams=False).answer()

    def add_all() -> None:
        for _ in range(100_000):
            answer.add(0, TOKEN)
            answer.add(1, TOKEN)

    with pytest.raises(ApiError, match="at most 1,000,000") as refused:
        add_all()
    assert refused.value.status == 400


def test_a_stream_may_have_any_number_of_them() -> None:
    answer = plan(streams=True).answer()
    for _ in range(50_000):
        [_] = answer.stream(0, TOKEN)


def response() -> Answer:
    request = GenerateRequest("r", "a", SamplingParams(logprobs=20))
    return ResponsePlan(request, {"id": "resp_1"}, Output(None, parallel=True, alternatives=20), True).answer()


def test_a_response_keeps_tokens_and_not_what_was_sent() -> None:
    answer = response()
    answer.add(0, TOKEN)
    tracemalloc.start()
    try:
        for _ in range(1000):
            [_] = answer.stream(0, TOKEN)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 200_000  # the tokens themselves are the test's
    assert not answer._choice.logprobs  # type: ignore[attr-defined]
    assert not answer._choice.text  # type: ignore[attr-defined]
    done, *_ = [json.loads(event.split(b"data: ")[1]) for event in answer.closing()]
    assert (len(done["text"]), len(done["logprobs"])) == (1001, 1001)


def test_a_response_of_too_many_log_probabilities_is_refused() -> None:
    answer = response()

    def add_all() -> None:
        for _ in range(50_000):
            answer.add(0, TOKEN)

    with pytest.raises(ApiError, match="top_logprobs: expected at most 1,000,000") as refused:
        add_all()
    assert refused.value.status == 400
    [event] = answer.failure(refused.value)
    assert b"response.failed" in event
