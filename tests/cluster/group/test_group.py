"""A group writes what one engine writes: greedy and seeded, alone and in company, whole and in pieces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from group_fixtures import Group, host_gpu
from waiting import until

PROMPTS = (
    "Tokens flow from storage",
    "A",
    "to memory, and from memory to layers. " * 4,
    "日本語 😀🚀",
    "layer runs when its bytes are there. " * 7,
    "springt über den faulen Hund, " * 2,
)
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 9},
    {"temperature": 1.0, "top_p": 0.9, "seed": 9, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"allowed_token_ids": tuple(range(9, 200)), "bad_words": ("e", "the", "r"), "temperature": 1.0, "seed": 9},
    {"allowed_token_ids": (7,), "bad_words": ("x",), "stop_token_ids": (7,), "min_tokens": 2},
    {"stop": ("e",), "logprobs": 3, "logit_bias": {5: 1.0}, "min_tokens": 3, "prompt_logprobs": 2},
)
SPLITS = (("0:2", "2:4"), ("0:1", "1:2", "2:4"), ("0:1", "1:2", "2:3", "3:4"))
DEVICES = (*((split, None) for split in SPLITS), (SPLITS[1], host_gpu))


def ask(served: Any, **params: Any) -> list[Any]:
    answers = [served.ask(prompt, **{"max_tokens": 20, **params}) for prompt in PROMPTS]
    return [answer.wait() for answer in answers]


def seen(answers: list[Any]) -> list[Any]:
    """Everything a client sees, but for the values of log-probabilities: another batch rounds differently."""
    return [
        [
            answer.text,
            answer.tokens,
            answer.last._replace(request_id="", logprobs=(), prompt_logprobs=None),
            scores(answer),
            [[one.token_id, *(top[0] for top in one.top)] for delta in answer.deltas for one in delta.logprobs],
        ]
        for answer in answers
    ]


def scores(answer: Any) -> list[Any]:
    """The log-probabilities of the prompt, if it was scored, to a precision that rounding does not change."""
    found = answer.deltas[0].prompt_logprobs
    tokens = () if found is None else found.tokens()
    return [(token.text, token.logprob and pytest.approx(token.logprob, abs=1e-3), len(token.top)) for token in tokens]


@pytest.mark.parametrize(("split", "gpu"), DEVICES)
def test_tokens_are_those_of_one_engine(
    split: tuple[str, ...], gpu: Any, group: Callable[..., Group], serve: Any
) -> None:
    made = group(*split, gpu=gpu).start()
    alone = serve()
    for params in PARAMS if gpu is None else PARAMS[2:]:
        assert seen(ask(made.leader, **params)) == seen(ask(alone, **params)), params
    assert made.formed
    until(lambda: made.leader.engine.stats()["kv_tokens_used"] == 0)
    stages = {(stage.process, stage.name) for stage in made.leader.timeline.stages()}
    assert all((f"worker {rank}", "first_forward") in stages for rank in range(1, len(split)))


def test_chunked_prefill_and_preemption_change_no_token(group: Callable[..., Group], serve: Any) -> None:
    params = {"max_tokens": 120, "temperature": 0.7, "top_k": 2, "seed": 5, "prompt_logprobs": 1}
    expected = seen(ask(serve(), **params))
    small = group("0:1", "1:3", "3:4", kv_cache_mb=1, max_batched_tokens=24, max_model_len=500).start()
    for worker in small.workers:
        worker.engine._cache.blocks.limit(36)  # type: ignore[attr-defined]
    assert seen(ask(small.leader, **params)) == expected
    stats = small.leader.engine.stats()
    assert stats["preemptions_total"] > 0
    assert stats["kv_tokens_used"] == 0
    assert small.formed


def test_several_steps_are_under_way(group: Callable[..., Group]) -> None:
    made = group("0:1", "1:2", "2:4").start()
    most = 0
    answers = [made.leader.ask(prompt, max_tokens=60) for prompt in PROMPTS]
    while not all(answer.deltas and answer.deltas[-1].finish_reason for answer in answers):
        most = max(most, made.leader.engine.stats()["steps_under_way"])
        time.sleep(0.001)  # the workers run in this process, too
        for answer in answers:
            while not answer.incoming.empty():
                answer.next()
    assert most == 3


def test_cancel_reaches_every_worker(group: Callable[..., Group]) -> None:
    made = group("0:2", "2:4").start()
    staying, leaving = made.leader.ask("A", max_tokens=60), made.leader.ask("to memory", max_tokens=400)
    leaving.next()
    made.leader.engine.cancel(leaving.id)
    assert leaving.last.finish_reason == "cancelled"
    assert staying.last.finish_reason == "length"
    assert made.leader.ask("A").last.finish_reason == "length"
    until(lambda: made.leader.engine.stats()["kv_tokens_used"] == 0)


def test_a_worker_takes_no_requests_of_its_own(group: Callable[..., Group]) -> None:
    from medusa_runtime.errors import OverloadedError

    made = group("0:2", "2:4").start()
    with pytest.raises(OverloadedError, match="expected the request at its group's leader"):
        made.workers[1].ask("A")


@pytest.mark.parametrize("gpu", [None, host_gpu])
def test_text_follows_its_grammar(gpu: Any, group: Callable[..., Group], serve: Any) -> None:
    pytest.importorskip("llguidance", reason="structured outputs need llguidance")
    from medusa_runtime.engine.base import StructuredOutputs

    forms = (StructuredOutputs("regex", "[0-9]{3}-[0-9]{4}"), StructuredOutputs("choice", '["yes", "no"]'))
    made, alone = group("0:1", "1:2", "2:4", gpu=gpu).start(), serve()
    for form in forms:
        for params in PARAMS[:2]:
            given = {"ignore_eos": False, "max_tokens": 40, "structured_outputs": form, **params}
            assert seen(ask(made.leader, **given)) == seen(ask(alone, **given))
    assert made.formed
    until(lambda: made.leader.engine.stats()["kv_tokens_used"] == 0)


@pytest.mark.parametrize("gpu", [None, host_gpu])
def test_the_beginning_of_a_prompt_is_found_in_all_workers(gpu: Any, group: Callable[..., Group], serve: Any) -> None:
    """In company of sequences that run, for some that need all tokens: penalties count those of the prompt."""
    made, alone = group("0:1", "1:2", "2:4", gpu=gpu).start(), serve(prefix_cache_mb=0)
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 9, "repetition_penalty": 1.2}
    prompts = [PROMPTS[4] + end for end in ("", "to memory", "and back", "to memory")]
    expected = [alone.ask(prompt, **params).tokens for prompt in prompts]
    answers = [made.leader.ask(prompts[0], **params).wait()]
    answers += [made.leader.ask(prompt, **params) for prompt in prompts[1:]]
    assert [answer.tokens for answer in answers] == expected
    assert [answer.last.cached_tokens > 32 for answer in answers] == [False, True, True, True]
    assert made.formed


@pytest.mark.parametrize("gpu", [None, host_gpu])
def test_what_a_lost_worker_had_is_computed_again(gpu: Any, group: Callable[..., Group], serve: Any) -> None:
    made, alone, most = group("0:2", "2:4", gpu=gpu).start(), serve(), 300 if gpu is None else 100
    expected = [answer.tokens for answer in ask(alone)]
    assert [answer.tokens for answer in ask(made.leader)] == expected
    running = made.leader.ask(PROMPTS[2], max_tokens=most)
    running.next()
    made.workers[1].stop.set()
    until(lambda: not made.formed)
    answers = ask(made.leader)
    assert [answer.tokens for answer in answers] == expected
    assert answers[4].last.cached_tokens == 0
    assert running.tokens == alone.ask(PROMPTS[2], max_tokens=most).tokens


@pytest.mark.parametrize("ends", ["lost", "consolidated"])
def test_a_prompt_that_waits_with_what_it_found_finds_nothing_once_that_is_lost(
    ends: str, group: Callable[..., Group], serve: Any
) -> None:
    made = group("0:2", "2:4", kv_cache_mb=1).start()
    made.wait_full()
    engine, waited = made.leader.engine, threading.Event()
    scheduler = engine._scheduler
    schedule = scheduler.schedule

    def observed(*arguments: Any) -> Any:
        spans = schedule(*arguments)
        if not waited.is_set() and any(sequence.blocks for sequence in scheduler.waiting):
            waited.set()
            if ends == "lost":
                engine._inbox.post(lambda: engine._fall_back("a worker is lost"))
            else:
                engine.consolidate()
        return spans

    scheduler.schedule = observed
    ended = [*range(10, 210), *range(10, 210)]
    made.leader.ask(ended, max_tokens=1).wait()
    running = [made.leader.ask([number] * 160, max_tokens=40) for number in (7, 8, 9)]
    for answer in running:
        answer.next()
    waiting = made.leader.ask([*ended, *[5] * 100], max_tokens=8)
    answers = [answer.tokens for answer in (*running, waiting)]
    assert waited.is_set()
    assert not made.formed
    alone = serve(prefix_cache_mb=0)
    assert answers[3] == alone.ask([*ended, *[5] * 100], max_tokens=8).tokens
    assert answers[:3] == [alone.ask([number] * 160, max_tokens=40).tokens for number in (7, 8, 9)]
