"""From a group to one instance, or to many: the same tokens whenever it happens, whatever goes wrong meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from group_fixtures import Group, host_gpu
from host_gpu import HostGpu, HostLink, Recorder
from medusa_runtime.errors import OverloadedError
from waiting import until

PROMPT = "Tokens flow from storage to memory, and from memory to layers. "
SHORT = "springt"
SEEDED = {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5}
COUNT = 24


class SlowLater(HostGpu):
    """A GPU to which the layers of other workers are copied only when the test lets them."""

    def open_link(self, *, in_background: bool) -> HostLink:
        link = super().open_link(in_background=in_background)
        link.open.clear()
        return link


def consolidated(made: Group) -> None:
    until(lambda: made.leader.engine.stats()["workers"] == 1)


def expected_of(serve: Any, **params: Any) -> tuple[Any, Any]:
    alone = serve()
    return alone.ask(PROMPT, max_tokens=COUNT, **params).wait(), alone.ask(SHORT, max_tokens=COUNT, **params).wait()


@pytest.mark.parametrize("params", [{}, SEEDED])
def test_the_switch_at_any_step_changes_no_token(
    params: dict[str, Any], group: Callable[..., Group], serve: Any
) -> None:
    first, second = expected_of(serve, **params)
    made = group("0:2", "2:4")
    made.start()
    made.wait_full()
    region = made.workers[1].engine._region
    for after in range(COUNT):
        answers = [made.leader.ask(PROMPT, max_tokens=COUNT, **params)]
        if after % 2:
            answers.append(made.leader.ask(SHORT, max_tokens=COUNT, **params))
        for _ in range(after):
            answers[0].next()
        made.leader.engine.consolidate("up" if after % 2 else "down")
        for answer, expected in zip(answers, (first, second), strict=False):
            assert answer.tokens == expected.tokens, after
            assert answer.text == expected.text
            assert answer.last == expected.last._replace(request_id=answer.id)
        consolidated(made)
        names = [stage.name for stage in made.leader.timeline.stages()]
        assert "consolidated" in names
        assert "alone" not in names
        for worker in made.workers:
            worker.close()
        made = group("0:2", "2:4")
        made.add(0, region=region)
        made.add(1, region=region)
        made.wait_full()


@pytest.mark.parametrize("gpu", [None, host_gpu])
def test_gathered_keys_and_values_are_used(gpu: Any, group: Callable[..., Group], serve: Any) -> None:
    made = group("0:1", "1:3", "3:4", gpu=gpu).start()
    made.wait_full()
    answer = made.leader.ask([7] * 200, max_tokens=40)
    for _ in range(10):
        answer.next()
    made.leader.engine.consolidate("down")
    assert answer.tokens == serve().ask([7] * 200, max_tokens=40).tokens
    assert made.leader.engine.stats()["steps_total"] == 40
    gathered = next(stage for stage in made.leader.timeline.stages() if stage.name == "gather")
    block_bytes = made.leader.engine._cache.shape.block_bytes  # type: ignore[attr-defined]
    assert gathered.detail["bytes"] >= 13 * block_bytes * 3 // 4
    assert gathered.detail["rounds"] >= 2


@pytest.mark.parametrize("gpu", [None, host_gpu])
def test_workers_become_instances(gpu: Any, group: Callable[..., Group], serve: Any) -> None:
    expected, _ = expected_of(serve)
    made = group("0:1", "1:3", "3:4", then="up", gpu=gpu).start()
    consolidated(made)
    for worker in made.workers:
        worker.engine.wait_ready()
        assert worker.ask(PROMPT, max_tokens=COUNT).tokens == expected.tokens
    assert [getattr(worker.engine, "released", "instance") for worker in made.workers] == ["instance"] * 3


def test_a_leader_with_all_layers_is_ready_when_it_released_a_worker_that_had_not_loaded_its_own(
    group: Callable[..., Group],
) -> None:
    slow, other = SlowLater(Recorder(), strict=True), host_gpu()
    other.link.open.clear()
    made = group("0:2", "2:4")
    made.add(0, gpu=lambda: slow)
    made.add(1, gpu=lambda: other)
    until(lambda: made.formed and slow.links)
    slow.links[0].open.set()
    made.leader.engine.full.wait()
    made.leader.engine.consolidate("down")
    consolidated(made)
    waiting = threading.Thread(target=made.leader.engine.wait_ready, daemon=True)
    waiting.start()
    waiting.join(30)
    other.link.open.set()
    assert not waiting.is_alive()


def test_a_file_that_cannot_be_read_is_named_once(
    group: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    made = group("0:2", "2:4").start()
    made.wait_full()
    path = Path(made.leader.engine._settings.group or "")  # type: ignore[attr-defined]
    text = path.read_text()
    path.unlink()
    until(lambda: "cannot be read" in caplog.text)
    time.sleep(0.6)  # two looks more
    assert caplog.text.count("cannot be read") == 1
    path.write_text(text.replace('"stay"', '"down"'))
    consolidated(made)


def test_workers_end(group: Callable[..., Group]) -> None:
    made = group("0:2", "2:4", then="down").start()
    until(lambda: made.workers[1].engine.released == "end")  # type: ignore[attr-defined]
    with pytest.raises(OverloadedError, match="holds a part of its model"):
        made.workers[1].ask("A")
    assert made.leader.ask("A").last.finish_reason == "length"


def test_many_requests_come_along(group: Callable[..., Group], serve: Any) -> None:
    alone = serve()
    made = group("0:1", "1:2", "2:4").start()
    made.wait_full()
    prompts = [[number] * (5 + 9 * number) for number in range(3, 15)]  # more than run at a time
    expected = [alone.ask(prompt, max_tokens=30).tokens for prompt in prompts]
    answers = [made.leader.ask(prompt, max_tokens=30) for prompt in prompts]
    answers[0].next()
    made.leader.engine.consolidate("down")
    assert [answer.tokens for answer in answers] == expected
    until(lambda: made.leader.engine.stats()["kv_tokens_used"] == 0)
    assert made.leader.engine.stats()["workers"] == 1


@pytest.mark.parametrize("gpu", [None, host_gpu])
def test_what_ended_requests_left_in_other_workers_is_not_used(
    gpu: Any, group: Callable[..., Group], serve: Any
) -> None:
    alone, prompts, most = serve(), [[7] * 100, [8] * 100], 300 if gpu is None else 120
    expected = [alone.ask(prompt, max_tokens=30).tokens for prompt in prompts]
    made = group("0:1", "1:3", "3:4", gpu=gpu).start()
    made.wait_full()
    ended = made.leader.ask(prompts[0], max_tokens=30)
    assert ended.tokens == expected[0]
    running = made.leader.ask(prompts[1], max_tokens=most)
    running.next()
    made.leader.engine.consolidate("down")
    consolidated(made)
    again = [made.leader.ask(prompt, max_tokens=30) for prompt in prompts]
    assert [answer.tokens for answer in again] == expected
    assert [answer.last.cached_tokens for answer in again] == [0, 96]  # what ran was gathered
    assert running.last.completion_tokens == most


def test_a_shared_block_is_gathered_once_all_workers_have_computed_it(
    group: Callable[..., Group], serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt goes on behind another one whose step is still under way, and which ends with that step."""
    prompt = [*range(20, 120)]
    expected = serve().ask([*prompt, 5, 6, 7], max_tokens=20).tokens
    made = group("0:2", "2:4").start()
    made.wait_full()
    goes_on = threading.Event()
    runner = made.workers[1].engine.runner
    forward = runner.forward

    def held(*arguments: Any) -> Any:
        goes_on.wait(20)
        return forward(*arguments)

    monkeypatch.setattr(runner, "forward", held)
    engine = made.leader.engine
    ended = made.leader.ask(prompt, max_tokens=1)
    until(lambda: len(engine._in_flight) == 1)
    answer = made.leader.ask([*prompt, 5, 6, 7], max_tokens=20)
    until(lambda: len(engine._in_flight) == 2)
    engine.consolidate()
    until(lambda: (found := engine._consolidation) is not None and found._rounds and not found._round)
    goes_on.set()
    assert answer.last.cached_tokens == 96
    assert len(ended.tokens) == 1
    consolidated(made)
    assert answer.tokens == expected
