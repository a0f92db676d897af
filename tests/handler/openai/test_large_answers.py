"""What an answer keeps in memory until it is sent."""

from __future__ import annotations

import json
import tracemalloc
from array import array
from pathlib import Path

import pytest
from medusa_handler.faults import ApiError
from medusa_handler.logprob_budget import LogprobBudget
from medusa_handler.openai.answer import ChoiceFormatter, Envelope
from medusa_handler.openai.chat import ChatFormatter
from medusa_handler.openai.completion import CompletionFormatter
from medusa_handler.openai.generation_response import Answer, GenerationPlan
from medusa_handler.openai.responses.answer import ResponsePlan
from medusa_handler.openai.responses.output import response_output
from medusa_runtime.engine.base import Delta, GenerateRequest, PromptLogprobs, SamplingParams, TokenLogprob

TOP = tuple((number, "a", -1.0) for number in range(20))
TOKEN = Delta("r", "a", (1,), (TokenLogprob(1, "a", -1.0, TOP),), None, None, 1, 1)


def plan(streams: bool) -> GenerationPlan:
    request = GenerateRequest("r", "a", SamplingParams(logprobs=20))
    envelope = Envelope("cmpl-1", "m", CompletionFormatter(20))
    return GenerationPlan([request] * 2, envelope, 2, 2, streams, include_usage=False)


def test_a_stream_forgets_what_it_has_sent() -> None:
    answer = plan(streams=True).answer(LogprobBudget())
    for place in range(5):
        for number in (0, 1):
            [event] = answer.stream(number, TOKEN)
            [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
            assert choice["text"] == "a"
            assert choice["logprobs"]["text_offset"] == [place]
    assert not any(choice.logprobs or choice.text for choice in answer._choices)  # type: ignore[attr-defined]


def test_a_whole_answer_of_too_many_log_probabilities_is_refused() -> None:
    answer = plan(streams=False).answer(LogprobBudget())

    def add_all() -> None:
        for _ in range(100_000):
            answer.add(0, TOKEN)
            answer.add(1, TOKEN)

    with pytest.raises(ApiError, match="at most 1,000,000") as refused:
        add_all()
    assert refused.value.status == 400


def test_a_stream_may_have_any_number_of_them() -> None:
    answer = plan(streams=True).answer(LogprobBudget())
    for _ in range(50_000):
        [_] = answer.stream(0, TOKEN)


def response() -> Answer:
    request = GenerateRequest("r", "a", SamplingParams(logprobs=20))
    output = response_output(None, parallel=True, alternatives=20)
    return ResponsePlan(request, {"id": "resp_1"}, output, True).answer(LogprobBudget())


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


def scored(tokens: int) -> Delta:
    places = tokens * 21
    ids, logprobs, ranks = array("i", [1]) * places, array("f", [-1.0]) * places, array("i", [1]) * tokens
    scores = PromptLogprobs((1, "a"), 21, ids, logprobs, ranks, {1: "a"}, {})
    return Delta("r", "", (), (), "length", None, tokens + 1, prompt_logprobs=scores)


@pytest.mark.parametrize(
    ("formatter", "copies"),
    [
        (CompletionFormatter(20, ["a"] * 8, 20), 8 * 2),
        (CompletionFormatter(20, ["a"] * 8), 8),
        (CompletionFormatter(None, (), 20), 8),
        (ChatFormatter(None, prompt_logprobs=20), 1),
    ],
)
def test_the_log_probabilities_of_a_prompt_count_in_each_choice_that_shows_them(
    formatter: ChoiceFormatter, copies: int
) -> None:
    request = GenerateRequest("r", "a", SamplingParams(logprobs=20, prompt_logprobs=20))
    plan = GenerationPlan([request] * 10, Envelope("cmpl-1", "m", formatter), 10, 8, False, include_usage=False)
    most = 1_000_000 // (21 * copies)
    answer = plan.answer(LogprobBudget())
    answer.add(0, scored(most - 100))
    answer.add(0, scored(100))
    with pytest.raises(ApiError, match="at most 1,000,000") as refused:
        answer.add(0, scored(1))
    assert refused.value.status == 400


@pytest.mark.parametrize("echo", ["a" * 10_001, "a" * 10_000, "another text of the same tokens"])
def test_the_log_probabilities_of_a_prompt_come_in_chunks_and_are_those_of_a_whole_answer(echo: str) -> None:
    request = GenerateRequest("r", "a", SamplingParams(logprobs=20, prompt_logprobs=20))
    envelope = Envelope("cmpl-1", "m", CompletionFormatter(20, [echo]))
    plans = [GenerationPlan([request], envelope, 1, 1, streams, False) for streams in (False, True)]
    whole, stream = (plan.answer(LogprobBudget()) for plan in plans)
    delta = scored(10_000)._replace(text="b", logprobs=(TokenLogprob(2, "b", -2.0, TOP),))
    whole.add(0, delta)
    [expected] = whole.whole()["choices"]
    events = list(stream.stream(0, delta))
    assert len(events) == -(-10_002 // (4096 // 21))
    assert max(map(len, events)) < 200_000
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert "".join(chunk["text"] for chunk in chunks) == expected["text"] == echo + "b"
    for name, values in expected["logprobs"].items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_the_answers_of_a_process_keep_so_many_log_probabilities_together() -> None:
    budget = LogprobBudget(most=21 * 100)
    first, second, third = (plan(streams=False).answer(budget) for _ in range(3))
    for answer, count in ((first, 40), (second, 20), (third, 40)):
        for _ in range(count):
            answer.add(0, TOKEN)
    with pytest.raises(ApiError, match="being made keep 2,100 of the 2,100 log-probabilities") as refused:
        third.add(0, TOKEN)
    assert (refused.value.status, refused.value.body()["error"]["code"]) == (503, "answer_memory")
    assert refused.value.headers["Retry-After"] == "1"
    third.close()
    assert budget.used == 21 * 60
    first.whole()
    for answer in (first, first, second):
        answer.close()
    assert budget.used == 0


def test_of_many_large_answers_that_are_asked_for_again_some_come() -> None:
    """All grow at the same time. If each could be refused, all would be, before any of them is complete."""
    budget, complete = LogprobBudget(most=21 * 100), 0
    answers = [plan(streams=False).answer(budget) for _ in range(64)]
    sizes = [0] * len(answers)
    for step in range(250):
        for number, answer in list(enumerate(answers))[:: 1 if step % 2 else -1]:
            try:
                answer.add(0, TOKEN)
            except ApiError:
                sizes[number] = -1
            sizes[number] += 1
            if sizes[number] in (0, 25):
                complete += sizes[number] == 25
                sizes[number] = 0
                answer.close()
    assert complete >= 10
    assert budget.used <= 21 * 125


def test_they_have_an_eighth_of_the_memory_and_room_for_four_answers(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    for available_kb, most in ((1 << 20, 4_000_000), (64 << 20, (64 << 30) // 8 // 300)):
        (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {available_kb} kB\n")
        assert LogprobBudget(root=tmp_path).most == most
