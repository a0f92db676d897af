"""An instance that still loads takes layers off another one's prefills: the same tokens, whatever it has loaded."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import Served, fill_region
from group_fixtures import Group, host_gpu
from live_fixtures import SlowRegion
from medusa_cluster.group.identity import identity_of
from medusa_cluster.group.live import target as live_target
from medusa_cluster.group.live.handover import send_cache, send_handover
from medusa_cluster.group.live.layer_queue import BestEffort, ZigZag
from medusa_cluster.group.wire.channel import TcpChannel, connect, error_of
from medusa_cluster.group.wire.message import Kind
from medusa_runtime.errors import OverloadedError
from waiting import until

from benchmarks.pipeline.zigzag import Scaling, best_effort, schedule
from benchmarks.ports import free_port

PROMPTS = [[number] * (2 + 7 * number) for number in range(15)]  # some shorter than a block of keys and values
SEEDED = {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5}


def first_scores(answer: Any) -> list[float]:
    """The log-probabilities of the prompt's tokens."""
    return list(answer.wait().deltas[0].prompt_logprobs.logprobs)


@pytest.mark.parametrize(
    ("params", "schedule", "gpu"),
    [({}, "best-effort", None), (SEEDED, "zigzag", None), (SEEDED, "zigzag", host_gpu)],
)
def test_tokens_are_those_of_one_engine(
    params: dict[str, Any], schedule: str, gpu: Any, slow: SlowRegion, pair: Callable[..., Group], serve: Any
) -> None:
    alone, prompts = serve(), PROMPTS if gpu is None else PROMPTS[1::8]
    expected = [alone.ask(prompt, max_tokens=12, **params).tokens for prompt in prompts]
    scores = [first_scores(alone.ask(prompt, prompt_logprobs=1)) for prompt in prompts]
    made = pair(schedule=schedule, gpu=gpu)
    target = made.workers[1].engine
    for number, part in enumerate(["embed", *(f"layers.{layer}." for layer in range(4))]):
        slow.arrive(part)
        until(lambda number=number: target.loaded_layers() == number)  # type: ignore[attr-defined, misc]
        answers = [made.leader.ask(prompt, max_tokens=12, **params) for prompt in prompts]
        assert [answer.tokens for answer in answers] == expected
        scored = [made.leader.ask(prompt, prompt_logprobs=1) for prompt in prompts]
        for answer, own in zip(scored, scores, strict=True):
            assert first_scores(answer) == pytest.approx(own, abs=1e-3)
    until(lambda: made.leader.ask(prompts[0], max_tokens=1) and made.leader.engine.stats()["layers_helped"] > 0)
    with pytest.raises(OverloadedError, match="works for another one"):
        made.workers[1].ask("A")
    slow.arrive("norm")
    slow.arrive("lm_head")
    slow.finish()
    target.wait_ready()
    until(lambda: not made.leader.engine.stats()["paired"])
    for worker in made.workers:
        assert [worker.ask(prompt, max_tokens=12, **params).tokens for prompt in prompts] == expected
        until(lambda worker=worker: worker.engine.stats()["kv_tokens_used"] == 0)  # type: ignore[misc]


@pytest.mark.parametrize("layers", [0, 2])
def test_a_target_that_ends_costs_no_token(
    layers: int, slow: SlowRegion, pair: Callable[..., Group], serve: Any
) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=8).tokens for prompt in PROMPTS]
    made = pair()
    slow.arrive("embed")
    for layer in range(layers):
        slow.arrive(f"layers.{layer}.")
    answers = [made.leader.ask(prompt, max_tokens=8) for prompt in PROMPTS]
    answers[0].next()
    made.workers[1].stop.set()
    assert [answer.tokens for answer in answers] == expected
    until(lambda: not made.leader.engine.stats()["paired"])
    until(lambda: made.leader.engine.stats()["kv_tokens_used"] == 0)


def test_an_idle_source_waits_for_the_layer_that_runs_and_no_further_one(
    slow: SlowRegion, pair: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pair()
    source, target = made.leader.engine, made.workers[1].engine
    slow.arrive("embed")
    slow.arrive("layers.0.")
    until(lambda: target.loaded_layers() == 1)  # type: ignore[attr-defined]
    seen: list[str] = []
    run_layers, send = target._model.run_layers, live_target.send_handover

    def run_slowly(*args: Any) -> Any:
        partners = source._pairs  # type: ignore[attr-defined]
        until(lambda: not partners or partners[0].pulled)
        time.sleep(0.05)  # for the message to arrive
        seen.append("layer")
        return run_layers(*args)

    def send_seen(*args: Any) -> None:
        seen.append("handover")
        send(*args)

    monkeypatch.setattr(target._model, "run_layers", run_slowly)
    monkeypatch.setattr(live_target, "send_handover", send_seen)
    answers = [made.leader.ask(prompt, max_tokens=1) for prompt in PROMPTS]
    assert all(answer.tokens for answer in answers)
    assert "layer" in seen
    assert ("layer", "layer") not in itertools.pairwise(seen)


def test_cancelled_and_preempted_requests_are_left_out(
    slow: SlowRegion, pair: Callable[..., Group], serve: Any
) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=90).tokens for prompt in PROMPTS]
    made = pair(kv_cache_mb=1)
    slow.arrive("embed")
    slow.arrive("layers.0.")
    answers = [made.leader.ask(prompt, max_tokens=90) for prompt in PROMPTS]
    leaving = [made.leader.ask(prompt, max_tokens=90) for prompt in PROMPTS]
    for answer in leaving:
        made.leader.engine.cancel(answer.id)
    assert [answer.tokens for answer in answers] == expected
    assert {answer.last.finish_reason for answer in leaving} == {"cancelled"}
    assert made.leader.engine.stats()["preemptions_total"] > 0
    until(lambda: made.leader.engine.stats()["kv_tokens_used"] == 0)


def test_a_lost_source_leaves_an_instance(group: Callable[..., Group], checkpoint: Path) -> None:
    region = fill_region(checkpoint)
    made = group("0:4", "0:4", form_s=0.3)
    lonely = made.add(1, layers=None, mode="live", region=region)
    lonely.engine.wait_ready()
    assert lonely.ask("A").last.finish_reason == "length"
    region.close()


@pytest.mark.parametrize("mode", ["live", "disaggregated"])
def test_an_engine_that_replaces_a_released_targets_looks_for_no_source(
    group: Callable[..., Group], checkpoint: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = group("0:4", "0:4", form_s=60.0, mode=mode, then="up")
    began = time.monotonic()
    alone = made.add(1, layers=None)
    alone.engine.wait_ready()
    assert alone.ask("A").last.finish_reason == "length"
    assert time.monotonic() - began < 15
    assert "could not be reached" not in caplog.text


@pytest.mark.parametrize(("layers", "load", "batches"), [(7, 6, 8), (4, 2, 4), (8, 3, 6), (4, 3, 5)])
def test_the_queues_decide_as_the_schedules_do(layers: int, load: int, batches: int) -> None:
    """A pair on a clock of layers, with the queues that the engines use."""
    scaling = Scaling.equal(layers, load, batches)
    for made, expected in (
        (ZigZag(layers), schedule(scaling, take_untouched=True)),
        (BestEffort(layers), best_effort(scaling)),
    ):
        numbers = [made.add() for _ in range(batches)]
        finish, done = dict.fromkeys(numbers, 0), dict.fromkeys(numbers, 0)
        now, source_free, left = 0, 0, set(numbers)
        while left:
            loaded = scaling.loaded(now)
            running = made.next(loaded)
            if running is not None:
                made.layer_done(running)
                done[running] += 1
            now += 1
            if source_free <= now and (taken := made.pull(loaded)) is not None:
                source_free = max(now, source_free) + layers - done[taken]
                finish[taken] = source_free
                left.discard(taken)
        assert sum(finish.values()) / batches <= expected.mean * 1.05


def disaggregated(group: Callable[..., Group], prefilling: int, gpu: Any = None, **settings: Any) -> Group:
    made = group(*["0:4"] * (1 + prefilling), mode="disaggregated", gpu=gpu, **settings)
    for rank in range(1 + prefilling):
        made.add(rank, layers=None, mode="disaggregated")
    source: Any = made.leader.engine
    until(lambda: [pair.loading for pair in source._pairs] == [False] * prefilling)
    return made


def is_prefilling(worker: Served) -> bool:
    return "prefilling" in [stage.name for stage in worker.timeline.stages()]


def test_one_that_loads_gets_no_prompt_while_another_one_has_all_layers(
    slow: SlowRegion, pair: Callable[..., Group], serve: Any
) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=6).tokens for prompt in PROMPTS]
    made = pair(mode="disaggregated", instances=3)
    source: Any = made.leader.engine
    until(lambda: [pair.loading for pair in source._pairs] == [False, True])
    slow.arrive("embed")
    answers = [made.leader.ask(prompt, max_tokens=6) for prompt in PROMPTS]
    assert [answer.tokens for answer in answers] == expected  # though no layer comes
    slow.arrive("")
    slow.finish()
    until(lambda: not any(pair.loading for pair in source._pairs))
    assert is_prefilling(made.workers[2])
    assert [answer.tokens for answer in [made.leader.ask(prompt, max_tokens=6) for prompt in PROMPTS]] == expected


@pytest.mark.parametrize("gpu", [None, host_gpu])
def test_one_that_will_prefill_runs_the_layers_that_it_has(
    gpu: Any, slow: SlowRegion, pair: Callable[..., Group], serve: Any
) -> None:
    prompts = [*PROMPTS, [1] * 150] if gpu is None else PROMPTS[::6]
    alone = serve(max_batched_tokens=100)
    expected = [alone.ask(prompt, max_tokens=12).tokens for prompt in prompts]
    made = pair(mode="disaggregated", gpu=gpu, max_batched_tokens=100)
    target: Any = made.workers[1].engine
    for number, part in enumerate(["embed", "layers.0.", "layers.1."]):
        slow.arrive(part)
        until(lambda number=number: target.loaded_layers() == number)  # type: ignore[misc]
        answers = [made.leader.ask(prompt, max_tokens=12) for prompt in prompts]
        assert [answer.tokens for answer in answers] == expected
    until(lambda: made.leader.ask(prompts[0], max_tokens=1) and made.leader.engine.stats()["layers_helped"] > 0)
    assert not is_prefilling(made.workers[1])
    slow.arrive("")
    slow.finish()
    until(lambda: is_prefilling(made.workers[1]))
    assert [made.leader.ask(prompt, max_tokens=12).tokens for prompt in prompts] == expected
    until(lambda: made.leader.engine.stats()["kv_tokens_used"] == 0)


def test_others_prefill_prompts_that_are_longer_than_a_step(group: Callable[..., Group], serve: Any) -> None:
    prompts = [[number] * 60 for number in range(1, 4)]
    alone = serve(max_batched_tokens=20)
    expected = [alone.ask(prompt, max_tokens=6).tokens for prompt in prompts]
    made = disaggregated(group, 1, max_batched_tokens=20)
    answers = [made.leader.ask(prompt, max_tokens=6) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    assert made.leader.engine.stats()["layers_helped"] > 0


def release(worker: Served) -> None:
    path = Path(worker.engine._settings.group or "")
    path.write_text(path.read_text().replace('"stay"', '"up"'))


@pytest.mark.parametrize(("params", "gpu"), [({}, None), (SEEDED, None), (SEEDED, host_gpu)])
def test_others_prefill_and_become_instances(
    params: dict[str, Any], gpu: Any, group: Callable[..., Group], serve: Any
) -> None:
    alone, prompts = serve(), PROMPTS if gpu is None else PROMPTS[::6]
    expected = [alone.ask(prompt, max_tokens=12, **params).tokens for prompt in prompts]
    made = disaggregated(group, 2, gpu)
    answers = [made.leader.ask(prompt, max_tokens=12, **params) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    helped = made.leader.engine.stats()["layers_helped"]
    assert helped > 0
    assert helped % 4 == 0  # whole prefills
    for number, worker in enumerate(made.workers[1:]):
        release(worker)
        worker.engine.wait_ready()
        until(lambda number=number: made.leader.engine.stats()["paired"] == 1 - number)  # type: ignore[misc]
    for worker in made.workers:
        assert worker.ask(PROMPTS[0], max_tokens=12, **params).tokens == expected[0]
        until(lambda worker=worker: worker.engine.stats()["kv_tokens_used"] == 0)  # type: ignore[misc]


@pytest.mark.parametrize("lost", [False, True], ids=["released", "lost"])
def test_one_that_has_prefilled_is_an_instance_for_which_others_prefill(
    lost: bool, group: Callable[..., Group], serve: Any
) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=12).tokens for prompt in PROMPTS]
    made = group("0:4", "0:4", "0:4", mode="disaggregated", form_s=2.0)
    made.add(0, layers=None)
    second = made.add(1, layers=None, listen=f"127.0.0.1:{free_port()}")
    until(lambda: made.leader.engine.stats()["paired"] == 1)
    until(lambda: "prefilling" in [stage.name for stage in second.timeline.stages()])
    values = identity(second)
    busy = connect(second.engine.plan.listen, rank=2, **values)
    refusal = busy.receive()
    assert refusal is not None
    assert "works for another one" in str(error_of(refusal))
    busy.close()
    if lost:
        for partner in made.leader.engine._pairs:  # type: ignore[attr-defined]
            partner.channel.close()
    else:
        release(second)
    second.engine.wait_ready()
    third = made.add(2, layers=None, leader=second.engine.plan.listen)
    until(lambda: second.engine.stats()["paired"] == 1)
    assert [second.ask(prompt, max_tokens=12).tokens for prompt in PROMPTS] == expected
    assert second.engine.stats()["layers_helped"] > 0
    with pytest.raises(OverloadedError, match="works for another one"):
        third.ask("A")


def test_a_file_that_cannot_be_read_for_a_moment_is_read_again(
    group: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    made = disaggregated(group, 1)
    path = Path(made.workers[1].engine._settings.group or "")
    text = path.read_text()
    path.write_text("{")
    until(lambda: "cannot be read" in caplog.text)
    time.sleep(0.6)  # two looks more
    assert caplog.text.count("cannot be read") == 1
    path.write_text(text.replace('"stay"', '"up"'))
    until(lambda: made.leader.engine.stats()["paired"] == 0)


def test_a_prefill_instance_that_ends_costs_no_token(group: Callable[..., Group], serve: Any) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=12).tokens for prompt in PROMPTS]
    made = disaggregated(group, 2)
    answers = [made.leader.ask(prompt, max_tokens=12) for prompt in PROMPTS]
    answers[0].next()
    made.workers[2].stop.set()
    assert [answer.tokens for answer in answers] == expected
    until(lambda: made.leader.engine.stats()["paired"] == 1)
    made.workers[1].stop.set()
    assert made.leader.ask(PROMPTS[0], max_tokens=12).tokens == expected[0]


def test_text_follows_its_grammar(group: Callable[..., Group], serve: Any) -> None:
    pytest.importorskip("llguidance", reason="structured outputs need llguidance")
    from medusa_runtime.engine.base import StructuredOutputs

    given = {"ignore_eos": False, "structured_outputs": StructuredOutputs("regex", "[0-9]{3}-[0-9]{4}"), **SEEDED}
    alone, made = serve(), disaggregated(group, 1)
    expected = [alone.ask(prompt, max_tokens=40, **given).tokens for prompt in PROMPTS]
    assert [made.leader.ask(prompt, max_tokens=40, **given).tokens for prompt in PROMPTS] == expected
    assert made.leader.engine.stats()["layers_helped"] > 0


def identity(served: Served) -> dict[str, Any]:
    """What one says that greets an engine like a target."""
    engine: Any = served.engine
    values = identity_of(engine._region, engine._model.config, engine._dtype, size=engine.plan.size)
    common = {"group": engine.plan.number, "access": engine.plan.access, "purpose": "live"}
    return {**common, "deadline": time.monotonic() + 60, **values}


def partner(made: Group) -> TcpChannel:
    """The channel of one that greets like a target, and sends what a test sends."""
    return connect(made.leader.engine.plan.leader, rank=1, **identity(made.leader))  # type: ignore[attr-defined]


def test_partners_that_come_at_once_are_no_more_than_there_are_places(group: Callable[..., Group]) -> None:
    made = group("0:4", "0:4")
    source: Any = made.add(0, layers=None, mode="live").engine
    greeted = threading.Event()
    source._inbox.post(greeted.wait)  # the engine's thread is busy while they come
    channels = [partner(made) for _ in range(3)]
    first = [message.kind for channel in channels if (message := channel.receive()) is not None]
    greeted.set()
    for channel in channels:
        channel.close()
    assert sorted(first) == sorted([Kind.HEARTBEAT, Kind.ERROR, Kind.ERROR])


def test_a_partner_that_comes_while_the_source_waits_for_weights_is_not_lost(group: Callable[..., Group]) -> None:
    """The source's thread is busy for longer than a partner may be silent, and nobody reads what the partner says."""
    made = group("0:4", "0:4", mode="disaggregated", silent_s=1.0)
    source: Any = made.add(0, layers=None).engine
    loaded = threading.Event()
    source._inbox.post(loaded.wait)
    made.add(1, layers=None)
    until(lambda: source._free_slots._value == 0)  # accepted
    time.sleep(1.5)
    loaded.set()
    until(lambda: source.stats()["paired"] == 1)
    assert made.leader.ask(PROMPTS[3], max_tokens=2).tokens
    time.sleep(0.5)
    assert "unpaired" not in [stage.name for stage in made.leader.timeline.stages()]
    assert source.stats()["layers_helped"] > 0


@pytest.mark.parametrize("wrong", ["columns", "type", "keys"])
def test_a_target_that_hands_over_nonsense_costs_no_token(wrong: str, group: Callable[..., Group], serve: Any) -> None:
    import torch

    expected = serve().ask(PROMPTS[3], max_tokens=8).tokens
    made = group("0:4", "0:4")
    source: Any = made.add(0, layers=None, mode="live").engine
    channel, group_number, shape = partner(made), source.plan.number, source._cache.shape
    until(lambda: bool(source.stats()["paired"]))
    answer = made.leader.ask(PROMPTS[3], max_tokens=8)
    while (message := channel.receive()) is not None and message.kind is not Kind.PULL:
        if message.kind is Kind.OFFER:
            number = message.step
    tokens, columns = len(PROMPTS[3]), source._model.config.hidden_size
    keys = torch.float16 if wrong == "keys" else shape.dtype
    hidden = torch.zeros(tokens, columns + (wrong == "columns"))
    send_cache(channel, group_number, number, torch.zeros(1, 2, tokens, shape.kv_heads, shape.head_dim, dtype=keys))
    send_handover(channel, group_number, number, [1], [tokens], hidden.half() if wrong == "type" else hidden)
    assert answer.tokens == expected
    until(lambda: not source.stats()["paired"])
    channel.close()
