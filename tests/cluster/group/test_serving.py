"""`medusa serve --engine group`: a function answers with a group behind it as it does with an engine of its own."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.bench.served_instance import ServedInstance, serve_command
from waiting import until

from benchmarks.ports import free_port

pytestmark = pytest.mark.slow

QUESTION = {"prompt": "Tokens flow from storage to memory", "max_tokens": 40, "temperature": 1.0, "seed": 4}


class Instance(ServedInstance):
    def complete(self) -> str:
        answer = self.exchange("POST", "/v1/completions", json.dumps(QUESTION), timeout_s=90)
        assert answer.status == 200, answer.body
        return str(answer.json["choices"][0]["text"])

    def stats(self) -> str:
        body = self.exchange("GET", "/timeline", None, timeout_s=120).body
        return body if isinstance(body, str) else bytes(body).decode()


@pytest.fixture
def instances(tmp_path: Path, checkpoint: Path) -> Iterator[Callable[..., Instance]]:
    with ExitStack() as stack:

        def start(**environment: Any) -> Instance:
            variables = {"MEDUSA_THREADS": "1", "MEDUSA_KV_CACHE_MB": "4", "MEDUSA_NODE_SOCKET": "none"}
            variables |= {name: str(value) for name, value in environment.items()}
            command = serve_command(checkpoint, "--host", "127.0.0.1", "--port", "0", "--device", "cpu")
            log = stack.enter_context(open(tmp_path / f"{len(list(tmp_path.iterdir()))}.log", "w+b"))
            made = Instance(command, variables, inherit=True, log=log, start_timeout_s=60.0)
            stack.callback(made.close)
            return made

        yield start


def test_a_group_of_two_instances_answers_as_one(tmp_path: Path, instances: Callable[..., Instance]) -> None:
    expected = instances().complete()
    plan = {"group": "g", "token": "t", "size": 2, "leader": f"127.0.0.1:{free_port()}", "then": "stay"}
    files = []
    for rank in range(2):
        files.append(tmp_path / f"group-{rank}.json")
        files[rank].write_text(json.dumps({**plan, "rank": rank}))
    group = [
        instances(MEDUSA_ENGINE="group", MEDUSA_GROUP=files[rank], MEDUSA_LAYERS=("0:2", "2:4")[rank])
        for rank in range(2)
    ]
    assert group[0].complete() == expected
    assert "worker 1" in group[0].stats()
    assert group[1].exchange("GET", "/readyz", None, timeout_s=120).status == 503
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(group[0].complete()))
    asking.start()
    group[1].process.send_signal(signal.SIGKILL)
    asking.join(90)
    assert answers == [expected]
    until(lambda: "alone" in group[0].stats())
    assert group[0].complete() == expected
