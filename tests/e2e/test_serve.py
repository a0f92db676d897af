"""A cold process answers: every route a client uses, on the bundled model, through real processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.forked

Start = Callable[..., Any]


@pytest.mark.forked(False)
def test_a_request_sent_at_once_is_held_and_the_timeline_accounts_for_the_start(start: Start, example: Path) -> None:
    serving = start("--model", example)
    body = {"prompt": "This function returns", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, answer, headers = serving.request("POST", "/v1/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["text"].strip()
    assert answer["usage"]["completion_tokens"] == 12
    assert "server-timing" in headers
    status, timeline, _ = serving.request("GET", "/timeline")
    assert status == 200
    names = {stage["name"] for stage in timeline["stages"]}
    assert {"exec", "bind", "index", "fetch", "import", "skeleton", "apply", "first_token"} <= names
    assert {stage["process"] for stage in timeline["stages"]} >= {"supervisor", "prefetcher", "zygote", "engine"}
    assert serving.request("GET", "/timeline?format=chrome")[1]["traceEvents"]
    assert b"medusa" in serving.request("GET", "/metrics")[1]
    assert serving.stop() == 0


@pytest.mark.forked(False)
def test_a_start_lasts_until_the_handler_is_loaded_and_not_until_a_later_request(
    start: Start, example: Path, tmp_path: Path
) -> None:
    def until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert serving.process.poll() is None, log.read_text()
            time.sleep(0.02)

    go = tmp_path / "go"
    (tmp_path / "handler.py").write_text(
        "import os, time\n\n\nclass Handler:\n    def load(self, context):\n        self.model = context.model\n"
        f"        while not os.path.exists({str(go)!r}):\n            time.sleep(0.01)\n\n"
        "    def predict(self, request):\n        return self.model.generate('a', max_tokens=1)\n"
    )
    serving = start("--model", example, "--handler", tmp_path / "handler.py")
    log = serving.folder / "serve.log"
    until(lambda: serving.request("GET", "/readyz")[1].get("engine") == "ready")
    time.sleep(0.5)  # the terminal follows the start ten times a second
    assert "ready on" not in log.read_text()
    go.touch()
    until(lambda: "ready on" in log.read_text())
    time.sleep(0.5)  # idle
    timing = serving.request("POST", "/", {})[2]["server-timing"]
    stages = serving.request("GET", "/timeline")[1]["stages"]
    ended = {stage["name"]: stage["start_ms"] + stage["duration_ms"] for stage in reversed(stages)}
    assert float(timing.partition("dur=")[2]) == pytest.approx(max(ended["ready"], ended["handler"]), abs=0.1)
    assert serving.stop() == 0


def test_the_openai_client_works_plain_and_streaming(start: Start, example: Path) -> None:
    serving = start("--model", example)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    plain = client.completions.create(model=model, prompt="Return the", max_tokens=10, temperature=0)
    streamed = client.completions.create(model=model, prompt="Return the", max_tokens=10, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == plain.choices[0].text
    messages = [{"role": "user", "content": "What does len return?"}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=10, temperature=0)
    pieces = client.chat.completions.create(model=model, messages=messages, max_tokens=10, temperature=0, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == chat.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=model, prompt="x", max_tokens=-1)
    client.close()
    assert serving.stop() == 0


def test_refused_token_ids_are_named_as_the_client_named_them(start: Start, example: Path) -> None:
    serving = start("--model", example)
    serving.wait_ready()
    for path, body, field, expected in (
        ("/detokenize", {"tokens": [5] * (1 << 20) + [5]}, "tokens", "expected at most 1048576 in one request"),
        ("/detokenize", {"tokens": [99999]}, "tokens", "expected token ids between 0 and 2047, found 99999"),
        ("/v1/completions", {"prompt": [99999], "echo": True}, "prompt", "expected token ids between 0 and 2047"),
    ):
        status, answer, _ = serving.request("POST", path, body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert answer["error"]["message"].startswith(f"{field}: {expected}")


def test_a_crashed_engine_comes_back_while_the_region_stays(start: Start, example: Path) -> None:
    serving = start("--model", example)
    serving.wait_ready()
    before = serving.complete()["choices"][0]["text"]
    prefetches = [s for s in serving.request("GET", "/timeline")[1]["stages"] if s["name"] == "fetch"]
    outcome: list[tuple[int, object]] = []
    body = {"prompt": "The", "max_tokens": 400, "ignore_eos": True}
    asking = threading.Thread(target=lambda: outcome.append(serving.request("POST", "/v1/completions", body)[:2]))
    asking.start()
    time.sleep(0.15)
    os.kill(serving.child("engine"), signal.SIGKILL)
    assert serving.complete()["choices"][0]["text"] == before
    asking.join()
    status, answer = outcome[0]
    assert status == 200 or (status == 503 and "engine" in answer["error"]["message"])
    after = [s for s in serving.request("GET", "/timeline")[1]["stages"] if s["name"] == "fetch"]
    assert after == prefetches
    assert serving.stop() == 0


def test_a_killed_worker_is_replaced(start: Start, example: Path) -> None:
    serving = start("--model", example)
    serving.wait_ready()
    arbiter = serving.child("function")
    workers = [int(pid) for pid in Path(f"/proc/{arbiter}/task/{arbiter}/children").read_text().split()]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            assert serving.complete()["choices"][0]["text"]
            break
        except (ConnectionError, http.client.HTTPException):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert serving.stop() == 0


def test_probes_tell_apart_alive_and_ready_and_sigterm_lets_a_stream_finish(start: Start, example: Path) -> None:
    serving = start("--model", example)
    assert serving.request("GET", "/livez")[0] == 200
    serving.wait_ready()
    assert serving.request("GET", "/readyz")[0] == 200
    assert serving.request("GET", "/startupz")[0] == 200
    descendants = serving.children()
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=240)
    body = {"prompt": "The", "max_tokens": 200, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = response.readline()
    serving.process.send_signal(signal.SIGTERM)
    rest = response.read()
    assert first.startswith(b"data: ")
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert (first + rest).count(b'"text"') > 50
    connection.close()
    assert serving.wait_gone(descendants) == 0
