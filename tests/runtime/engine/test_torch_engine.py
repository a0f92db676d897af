"""The torch engine on a tiny model: what it writes, alone and in company, whole and in pieces."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.errors import ConfigError, CorruptError, OverloadedError, RequestError
from waiting import until

PROMPTS = (
    "Tokens flow from storage",
    "A",
    "to memory, and from memory to layers. " * 4,
    "Der schnelle braune Fuchs",
    "日本語 😀🚀",
    "layer runs when its bytes are there. " * 7,
    "çà et là",
    "springt über den faulen Hund, " * 2,
)


def alone(served: Any, prompts: Any = PROMPTS, **params: Any) -> list[list[int]]:
    return [served.ask(prompt, **params).tokens for prompt in prompts]


def together(served: Any, prompts: Any = PROMPTS, **params: Any) -> list[list[int]]:
    answers = [served.ask(prompt, **params) for prompt in prompts]
    return [answer.tokens for answer in answers]


def test_greedy_tokens_are_those_of_transformers(serve: Any, checkpoint: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    served = serve()
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    for prompt in PROMPTS:
        ids = served.engine.tokenize(prompt, True)
        answer = served.ask(prompt, max_tokens=24, skip_special_tokens=False)
        with torch.no_grad():
            given = torch.tensor([ids])
            found = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=24, eos_token_id=None)
        expected = found[0, len(ids) :].tolist()
        assert answer.tokens == expected
        assert answer.last.prompt_tokens == len(ids)
        assert answer.last.completion_tokens == 24
        assert answer.last.finish_reason == "length"
        assert answer.text == served.engine.detokenize(expected)


def test_a_batch_writes_what_each_writes_alone(serve: Any) -> None:
    served = serve()
    expected = alone(served, max_tokens=40)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert together(served, max_tokens=40) == expected


@pytest.mark.parametrize("max_batched_tokens", [1, 7, 64])
def test_chunked_prefill_writes_what_whole_prefill_writes(serve: Any, max_batched_tokens: int) -> None:
    expected = alone(serve())
    chunked = serve(max_batched_tokens=max_batched_tokens, max_concurrency=8)
    assert together(chunked) == expected
    assert chunked.engine.stats()["steps_total"] > 12


def test_preemption_changes_no_token(serve: Any) -> None:
    params = {"max_tokens": 160, "temperature": 0.7, "top_k": 2, "seed": 5}  # few choices: rounding cannot tip any
    expected = alone(serve(), **params)
    small = serve(kv_cache_mb=1)  # 1024 tokens, and the eight sequences come to over 1500
    assert together(small, **params) == expected
    stats = small.engine.stats()
    assert stats["preemptions_total"] > 0
    assert stats["kv_tokens_used"] == 0


def test_first_come_first_served(serve: Any) -> None:
    served = serve(max_concurrency=1)
    ended: list[str] = []
    for number, prompt in enumerate(PROMPTS):
        request = GenerateRequest(str(number), prompt, SamplingParams(max_tokens=3))
        served.engine.add(request, lambda delta: ended.append(delta.request_id) if delta.finish_reason else None)
    until(lambda: len(ended) == len(PROMPTS))
    assert ended == [str(number) for number in range(len(PROMPTS))]


def test_cancel_ends_a_request_and_frees_its_blocks(serve: Any) -> None:
    served = serve()
    staying, leaving = served.ask("A", max_tokens=60), served.ask("to memory", max_tokens=400)
    leaving.next()
    served.engine.cancel(leaving.id)
    assert leaving.last.finish_reason == "cancelled"
    assert 1 <= leaving.last.completion_tokens < 400
    assert staying.last.finish_reason == "length"
    assert served.engine.stats()["kv_tokens_used"] == 0
    served.engine.cancel("nobody")
    assert served.ask("A").last.finish_reason == "length"


def test_a_full_queue_refuses_and_says_when_to_come_again(serve: Any) -> None:
    served = serve(max_concurrency=1, max_waiting=2)
    answers = [served.ask("A", max_tokens=200) for _ in range(3)]
    with pytest.raises(OverloadedError, match="at most 2 waiting requests") as refused:
        served.ask("A")
    assert refused.value.retry_after_s >= 1
    for answer in answers:
        assert answer.last.finish_reason == "length"
    assert served.ask("A").last.finish_reason == "length"


def test_an_id_is_taken_once(serve: Any) -> None:
    served = serve()
    answer = served.ask("A", max_tokens=300)
    served.count -= 1
    with pytest.raises(RequestError, match="no running request has"):
        served.ask("A")
    served.engine.cancel(answer.id)


def test_a_sink_that_fails_ends_its_own_request_only(serve: Any) -> None:
    served = serve()

    def broken(delta: Any) -> None:
        raise ValueError("gone")

    expected = served.ask("A", max_tokens=30).tokens
    served.engine.add(GenerateRequest("broken", "A", SamplingParams()), broken)
    assert served.ask("A", max_tokens=30).tokens == expected
    until(lambda: served.engine.stats()["kv_tokens_used"] == 0)


def test_seeds_give_the_same_text_in_any_company(serve: Any) -> None:
    served = serve()
    params = {"temperature": 1.0, "top_k": 8, "max_tokens": 30}
    first = served.ask("A", seed=11, **params).tokens
    crowd = [served.ask(prompt, **params) for prompt in PROMPTS[2:6]]
    assert served.ask("A", seed=11, **params).tokens == first
    assert served.ask("A", seed=12, **params).tokens != first
    assert served.ask("A", **params).tokens != served.ask("A", **params).tokens
    for answer in crowd:
        answer.wait()


def test_an_engine_without_room_says_so(serve: Any) -> None:
    with pytest.raises(ConfigError, match="--max-model-len=9999"):
        serve(max_model_len=9999)
    assert serve(kv_cache_mb=1, max_model_len=64, max_concurrency=2).engine.info.kv_tokens == 128


def test_requests_end_with_an_error_when_the_engine_stops(serve: Any) -> None:
    served = serve()
    answer = served.ask("A", max_tokens=400)
    answer.next()
    served.engine.cancel("nobody")
    served.stop.set()
    last = answer.last
    if last.finish_reason == "error":
        assert last.error is not None
        assert last.error[0] == "Engine.Failed"
    served.thread.join(120)
    with pytest.raises(Exception, match="stopping"):
        served.ask("A")


def test_soak_with_random_cancels_leaves_no_block_behind(serve: Any) -> None:
    served = serve(kv_cache_mb=1, max_concurrency=6, max_batched_tokens=48, max_waiting=1000)
    rng = random.Random(3)
    answers = []
    for _ in range(150):
        prompt = [rng.randrange(3, 320) for _ in range(rng.choice((1, 5, 16, 17, 60, 200)))]
        answer = served.ask(prompt, max_tokens=rng.randrange(1, 60), temperature=rng.choice((0.0, 1.0)))
        answers.append(answer)
        if rng.random() < 0.3:
            served.engine.cancel(rng.choice(answers).id)
    reasons = [answer.last.finish_reason for answer in answers]
    assert {*reasons} == {"length", "cancelled"}
    assert all(answer.last.completion_tokens == len(answer.tokens) for answer in answers)
    stats = served.engine.stats()
    assert (stats["kv_tokens_used"], stats["running"], stats["waiting"]) == (0, 0, 0)
    assert stats["prefill_tokens_per_s"] > 0
    assert served.errors == []


def test_only_steps_of_many_tokens_after_the_first_one_say_what_can_be_computed(serve: Any) -> None:
    """The first one may wait for layers, and one of a few tokens takes about as long as one of many."""
    served = serve(max_batched_tokens=48, prefix_cache_mb=0)
    for prompt, counts in ((range(3, 43), False), (range(3, 23), False), (range(3, 43), True)):
        served.ask(list(prompt), max_tokens=1).wait()
        assert (served.engine.stats()["prefill_tokens_per_s"] > 0) == counts


@pytest.mark.parametrize("params", [{"temperature": 10**30}, {"repetition_penalty": 10**30}])
def test_whole_numbers_of_any_size_end_no_request(serve: Any, params: dict[str, Any]) -> None:
    served = serve()
    beside = served.ask("A", max_tokens=40)
    for _ in range(4):  # the third step in a row that fails ends an engine
        assert served.ask("A", **params).last.finish_reason == "length"
    assert beside.last.finish_reason == "length"
    assert not served.errors


def test_ids_that_the_model_has_not_end_nothing(serve: Any, make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, -1, 320, 99999]}')
    served = serve(folder)
    answer = served.ask("A", min_tokens=6, max_tokens=12, ignore_eos=False, logit_bias={319: 100.0})
    assert served.engine.info.eos_token_ids == (1,)
    assert answer.tokens == [319] * 12  # -1 would be its index from behind
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, true]}')
    with pytest.raises(CorruptError, match="expected eos_token_id to be a token id or a list"):
        serve(folder)


def test_a_request_that_ends_before_its_turn_holds_nothing(serve: Any) -> None:
    served = serve(max_concurrency=1)
    admit = served.engine._requests.open

    def cancelled_at_once(request: Any, sink: Any) -> Any:
        """As another thread may, between the two halves of ``add``."""
        sequence = admit(request, sink)
        served.engine.cancel(sequence.id)
        until(lambda: not len(served.engine._requests))
        return sequence

    served.engine._requests.open = cancelled_at_once
    assert served.ask("A").last.finish_reason == "cancelled"
    served.engine._requests.open = admit
    assert len(served.ask("A").tokens) == 12
    until(lambda: served.engine.stats()["kv_tokens_used"] == 0)
