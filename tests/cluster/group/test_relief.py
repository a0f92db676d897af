"""Prefill apart: one that still loads runs first layers of what another one prefills, with the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from group_fixtures import Group, host_gpu
from live_fixtures import SlowRegion
from medusa_cluster.group.identity import identity_of
from medusa_cluster.group.plan import GroupPlan
from medusa_cluster.group.wire.channel import TcpChannel, connect
from medusa_cluster.group.wire.message import Kind, hidden_states, json_message
from medusa_runtime.errors import ConfigError
from waiting import until

PROMPTS = [[number % 90] * (2 + 11 * (number % 15)) for number in range(45)]
SEEDED = {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5}


@pytest.fixture
def three(pair: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Group]:
    """Make one that decodes, one that prefills and is slow, and one that loads and relieves it."""

    def make(**settings: Any) -> Group:
        settings = {"prefix_cache_mb": 0, **settings}  # the same prompts come again, and shall be computed again
        made = pair(mode="disaggregated", instances=3, relieves=True, **settings)
        source: Any = made.leader.engine
        until(lambda: sorted((one.loading, one.relieves) for one in source._pairs) == [(False, False), (True, True)])
        slow_down(made.workers[1].engine, monkeypatch)
        return made

    return make


def slow_down(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine be busy for so long that others get something to do."""
    run_layers = engine._model.run_layers

    def run_slowly(*args: Any) -> Any:
        time.sleep(0.01)
        return run_layers(*args)

    monkeypatch.setattr(engine._model, "run_layers", run_slowly)


def stats(made: Group) -> dict[str, Any]:
    return made.leader.engine.stats()


@pytest.mark.parametrize(
    ("params", "gpu"), [({}, None), (SEEDED, None), pytest.param(SEEDED, host_gpu, marks=pytest.mark.slow)]
)
def test_tokens_are_those_of_one_engine_whatever_it_has_loaded(
    params: dict[str, Any], gpu: Any, slow: SlowRegion, three: Callable[..., Group], serve: Any
) -> None:
    alone, prompts = serve(), PROMPTS if gpu is None else PROMPTS[:15]
    expected = [alone.ask(prompt, max_tokens=6, **params).tokens for prompt in prompts]
    made = three(gpu=gpu)
    loading: Any = made.workers[2].engine
    for number, part in enumerate(["embed", *(f"layers.{layer}." for layer in range(4))]):
        slow.arrive(part)
        until(lambda number=number: loading.loaded_layers() == number)  # type: ignore[misc]
        before = stats(made)["layers_relieved"]

        def relieved(before: int = before) -> bool:
            answers = [made.leader.ask(prompt, max_tokens=6, **params) for prompt in prompts]
            assert [answer.tokens for answer in answers] == expected
            return stats(made)["layers_relieved"] > before

        if 0 < number < 4:
            until(relieved)
        else:  # it can run no layer; or all of them, and nobody has to go on
            relieved()
    assert stats(made)["layers_helped"] % 4 == 0  # nothing was left to the one that decodes
    slow.arrive("")
    slow.finish()
    source: Any = made.leader.engine
    until(lambda: not any(one.loading for one in source._pairs))
    assert [one.tokens for one in [made.leader.ask(prompt, max_tokens=6, **params) for prompt in prompts]] == expected
    for worker in made.workers:
        until(lambda worker=worker: worker.engine.stats()["kv_tokens_used"] == 0)  # type: ignore[misc]


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("lost", [[2], [1], [1, 2]], ids=["loading", "loaded", "both"])
def test_one_that_ends_costs_no_token(
    lost: list[int], layers: int, slow: SlowRegion, three: Callable[..., Group], serve: Any
) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=8).tokens for prompt in PROMPTS]
    made = three()
    slow.arrive("embed")
    for layer in range(layers):
        slow.arrive(f"layers.{layer}.")
    answers = [made.leader.ask(prompt, max_tokens=8) for prompt in PROMPTS]
    until(lambda: stats(made)["layers_relieved"] > 0 or (not layers and stats(made)["layers_helped"] > 0))
    for rank in lost:
        made.workers[rank].stop.set()
    assert [answer.tokens for answer in answers] == expected
    until(lambda: stats(made)["paired"] == 2 - len(lost))
    until(lambda: stats(made)["kv_tokens_used"] == 0)
    assert made.leader.ask(PROMPTS[3], max_tokens=8).tokens == expected[3]


def test_cancelled_and_preempted_requests_are_left_out(
    slow: SlowRegion, three: Callable[..., Group], serve: Any
) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=60).tokens for prompt in PROMPTS]
    made = three(kv_cache_mb=1)
    slow.arrive("embed")
    slow.arrive("layers.0.")

    def relieved() -> bool:
        answers = [made.leader.ask(prompt, max_tokens=60) for prompt in PROMPTS]
        leaving = [made.leader.ask(prompt, max_tokens=60) for prompt in PROMPTS[:20]]
        for answer in leaving:
            made.leader.engine.cancel(answer.id)
        assert [answer.tokens for answer in answers] == expected
        assert {answer.last.finish_reason for answer in leaving} == {"cancelled"}
        return bool(stats(made)["layers_relieved"] > 0)

    until(relieved)
    assert stats(made)["preemptions_total"] > 0
    until(lambda: stats(made)["kv_tokens_used"] == 0)


def test_one_that_is_told_to_decode_hands_over_what_waits_with_it(
    slow: SlowRegion, three: Callable[..., Group], serve: Any
) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=6).tokens for prompt in PROMPTS]
    made = three()
    slow.arrive("embed")
    slow.arrive("layers.0.")
    answers = [made.leader.ask(prompt, max_tokens=6) for prompt in PROMPTS]
    path = Path(made.workers[2].engine._settings.group or "")
    path.write_text(path.read_text().replace('"stay"', '"up"'))
    assert [answer.tokens for answer in answers] == expected
    until(lambda: stats(made)["paired"] == 1)
    slow.arrive("")
    slow.finish()
    made.workers[2].engine.wait_ready()
    assert made.workers[2].ask(PROMPTS[3], max_tokens=6).tokens == expected[3]


def _partner(made: Group, rank: int) -> TcpChannel:
    engine: Any = made.leader.engine
    values = identity_of(engine._region, engine._model.config, engine._dtype, size=engine.plan.size)
    plan = engine.plan
    return connect(
        plan.leader, rank=rank, group=plan.number, access=plan.access, purpose="live",
        deadline=time.monotonic() + 60, **values,
    )  # fmt: skip


def test_one_that_relieves_and_hands_over_nonsense_costs_no_token(
    group: Callable[..., Group], serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=8).tokens for prompt in PROMPTS[:20]]
    made = group("0:4", "0:4", "0:4", mode="disaggregated")
    source: Any = made.add(0, layers=None).engine
    channel, number = _partner(made, 1), source.plan.number
    until(lambda: stats(made)["paired"] == 1)
    alive = json_message(Kind.HEARTBEAT, number, {"loading": True, "relieves": True})
    channel.send(alive)
    until(lambda: source._pairs[0].relieves)
    slow_down(made.add(1, layers=None).engine, monkeypatch)

    def are_there() -> bool:
        channel.send(alive)  # a start may take longer than a partner may be silent
        return sorted(one.loading for one in source._pairs) == [False, True]

    until(are_there)
    answers = [made.leader.ask(prompt, max_tokens=8) for prompt in PROMPTS[:20]]
    while (message := channel.receive()) is not None and message.kind is not Kind.PULL:
        if message.kind is Kind.OFFER:
            batch, prompts = message.step, message.values()["prompts"]
    lengths, columns = [len(prompt) for prompt in prompts], source._model.config.hidden_size
    channel.send(json_message(Kind.HANDOVER, number, {"parts": [2] * 3, "lengths": lengths}, step=batch))
    channel.send(hidden_states(number, batch, 1, torch.zeros(sum(lengths), columns)))
    assert [answer.tokens for answer in answers] == expected
    until(lambda: stats(made)["paired"] == 1)
    channel.close()


def test_only_one_that_prefills_for_another_one_relieves() -> None:
    plan = {"group": "g", "token": "t", "size": 2, "leader": "h:1", "relieves": True}
    assert GroupPlan.parse(plan | {"rank": 1, "mode": "disaggregated"}).relieves
    for wrong in ({"rank": 0, "mode": "disaggregated"}, {"rank": 1, "mode": "live"}):
        with pytest.raises(ConfigError, match="relieves: expected false"):
            GroupPlan.parse(plan | wrong)
