"""Workers end, hang or never come: every request goes on from its prompt and tokens so far, unchanged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from group_fixtures import Group, host_gpu
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.engine.client import EngineClient, TokenStream
from medusa_runtime.engine.torch import transfers
from medusa_runtime.errors import ConfigError, EngineError
from waiting import until

from benchmarks.ports import free_port

PROMPT = "Tokens flow from storage to memory, and from memory to layers. "
SEEDED = {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5}
COUNT = 24


@pytest.mark.parametrize("params", [{}, SEEDED])
def test_a_worker_that_ends_at_any_step_changes_no_token(
    params: dict[str, Any], group: Callable[..., Group], serve: Any
) -> None:
    alone = serve()
    expected = [alone.ask(prompt, max_tokens=COUNT, **params).wait() for prompt in (PROMPT, "A")]
    region = None
    for after in range(0, COUNT, 3):
        made = group("0:1", "1:2", "2:4")
        for rank in range(3):
            made.add(rank, region=region)
        region = made.leader.engine._region
        answers = [made.leader.ask(prompt, max_tokens=COUNT, **params) for prompt in (PROMPT, "A")]
        for _ in range(after):
            answers[0].next()
        made.workers[1 + after % 2].stop.set()
        for answer, right in zip(answers, expected, strict=True):
            assert answer.tokens == right.tokens, after
            assert answer.text == right.text
            assert answer.last == right.last._replace(request_id=answer.id)
        for worker in made.workers:
            worker.close()


@pytest.mark.parametrize("gpu", [None, host_gpu])
def test_a_worker_that_ends_while_its_blocks_are_gathered(
    gpu: Any, group: Callable[..., Group], serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_TRANSFER_BYTES", 1)  # block by block
    expected = serve().ask([7] * 300, max_tokens=60).tokens
    made = group("0:2", "2:4", link_bytes_per_s=400e3, gpu=gpu).start()  # gathering takes some 0.4 s
    until(lambda: made.formed and all(worker.engine.full.is_set() for worker in made.workers))
    answer = made.leader.ask([7] * 300, max_tokens=60)
    for _ in range(3):
        answer.next()
    made.leader.engine.consolidate("down")
    until(
        lambda: made.leader.engine._consolidation is not None and made.leader.engine._consolidation._gathering.bytes > 0
    )
    made.workers[1].stop.set()
    assert answer.tokens == expected
    assert made.leader.engine.stats()["workers"] == 1
    assert "alone" in [stage.name for stage in made.leader.timeline.stages()]


def test_a_group_that_cannot_form_is_one_instance(group: Callable[..., Group], serve: Any) -> None:
    made = group("0:2", "2:4", form_s=0.5)
    made.add(0)
    assert made.leader.ask(PROMPT, max_tokens=COUNT).tokens == serve().ask(PROMPT, max_tokens=COUNT).tokens
    made.leader.engine.wait_ready()
    late = made.add(1)
    late.engine.wait_ready()  # an instance, too: its leader did not wait for it
    assert late.ask(PROMPT, max_tokens=3).last.finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "bfloat16"}, r"one type to compute in \(--dtype\); found 'float32' and 'bfloat16'"),
        ({"layers": "3:4"}, "workers whose layers follow one another up to 4, found 0:2, 3:4"),
        ({"kv_cache_mb": 1, "max_model_len": 32}, "room for"),
        ({"size": 3}, "one size of the group"),
    ],
)
def test_workers_that_do_not_fit_are_refused(
    changes: dict[str, Any], reason: str, group: Callable[..., Group], caplog: Any
) -> None:
    made = group("0:2", "2:4", form_s=30.0, kv_cache_mb=8, max_concurrency=64)
    made.add(0)
    if "max_model_len" in changes:
        made.leader.engine._cache.blocks.limit(2)
    made.add(1, **changes)
    assert made.leader.ask("A").last.finish_reason == "length"
    import re

    assert re.search(reason, caplog.text)
    assert made.leader.engine.stats()["workers"] == 1


def test_a_wrong_token_forms_no_group(group: Callable[..., Group], caplog: Any) -> None:
    made = group("0:2", "2:4", form_s=2.0)
    made.add(0)
    made.add(1, token="wrong")
    assert made.leader.ask("A").last.finish_reason == "length"
    assert "does not belong to this group" in caplog.text


def test_the_leaders_layers_alone_need_the_option(group: Callable[..., Group]) -> None:
    with pytest.raises(ConfigError, match="needs --layers"):
        group("0:2", "2:4").add(0, layers=None)
    with pytest.raises(ConfigError, match="a range within 0:4"):
        group("0:2", "2:9").add(1)


# Processes.


class Processes:
    """A group of two processes, and a client of the leader."""

    def __init__(self, stack: ExitStack, folder: Path, checkpoint: Path, **plan: Any) -> None:
        self.leader = f"127.0.0.1:{free_port()}"
        self.checkpoint = checkpoint
        self.folder = folder
        self.plan = {"group": "g", "token": "t", "size": 2, "then": "stay", "exit": True, "form_s": 60.0, **plan}
        self.stack = stack
        self.processes = [self.start(rank) for rank in range(2)]
        until(lambda: (folder / "0.sock").exists())
        self.client = EngineClient(str(folder / "0.sock"))
        stack.callback(self.client.close)
        self.client.wait_ready(60)

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        path = self.folder / f"{rank}.json"
        path.write_text(json.dumps({**self.plan, "rank": rank, "leader": self.leader}))
        arguments = ["--model", str(self.checkpoint), "--group", str(path), "--layers", ("0:2", "2:4")[rank]]
        arguments += ["--socket", str(self.folder / f"{rank}.sock"), "--die-with-parent"]
        environment = {**os.environ, "MEDUSA_DEVICE": "cpu", "MEDUSA_THREADS": "1", "MEDUSA_KV_CACHE_MB": "4"}
        process = subprocess.Popen([sys.executable, "-m", "medusa_cluster.group.worker", *arguments], env=environment)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def engine_of(self, rank: int) -> int:
        """The engine process of a worker."""
        children = Path(f"/proc/{self.processes[rank].pid}/task/{self.processes[rank].pid}/children").read_text()
        return next(int(pid) for pid in children.split() if "engine" in Path(f"/proc/{pid}/comm").read_text())

    def ask(self, count: int = 200, **params: Any) -> TokenStream:
        given = SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params})
        return self.client.generate(GenerateRequest(f"r{time.monotonic_ns()}", PROMPT, given))


def tokens_of(stream: TokenStream) -> list[int]:
    return [token for delta in stream for token in delta.token_ids]


@pytest.fixture
def processes(tmp_path: Path, checkpoint: Path) -> Iterator[Callable[..., Processes]]:
    with ExitStack() as stack:
        yield lambda **plan: Processes(stack, tmp_path, checkpoint, **plan)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_worker_costs_a_pause(
    number: signal.Signals, processes: Callable[..., Processes], serve: Any
) -> None:
    expected = serve().ask(PROMPT, max_tokens=200, **SEEDED).tokens
    made = processes(silent_s=1.5)
    assert made.client.stats()["workers"] == 2
    stream = made.ask(**SEEDED)
    found = [token for _ in range(20) for token in next(iter(stream)).token_ids]
    victim = made.engine_of(1)
    os.kill(victim, number)
    found += tokens_of(stream)
    assert found == expected
    assert made.client.stats()["workers"] == 1
    if number == signal.SIGSTOP:
        os.kill(victim, signal.SIGCONT)


@pytest.mark.slow
def test_a_group_ends_in_order_and_the_leader_goes_on(processes: Callable[..., Processes], serve: Any) -> None:
    expected = serve().ask(PROMPT, max_tokens=200).tokens
    made = processes(then="down")
    stream = made.ask()
    assert tokens_of(stream) == expected
    assert made.processes[1].wait(120) == 0
    assert tokens_of(made.ask()) == expected
    made.processes[0].terminate()
    assert made.processes[0].wait(120) == 0


@pytest.mark.slow
def test_a_leader_that_is_killed_ends_what_had_begun(processes: Callable[..., Processes]) -> None:
    made = processes()
    stream = made.ask()
    next(iter(stream))
    os.kill(made.engine_of(0), signal.SIGKILL)
    with pytest.raises(EngineError, match="ended while it worked on this request"):
        tokens_of(stream)
    assert made.processes[0].wait(120) == 2
