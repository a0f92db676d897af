"""`medusa batch` as a process of its own: its results, what ends it, and how it goes on."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import MEDUSA_MAIN, ForkServer
from plain_environ import plain_environ
from process_tree import descendants
from waiting import until

MEDUSA = Path(sys.executable).with_name("medusa")
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
PATIENCE_S = 120.0


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = {"prompt": f"def {custom_id}", "max_tokens": 4, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class ForkedBatch:
    """What the tests use of ``subprocess.Popen``."""

    def __init__(self, server: ForkServer, words: list[str], environ: dict[str, str], folder: Path) -> None:
        with (
            tempfile.NamedTemporaryFile(dir=folder, delete=False) as output,
            tempfile.NamedTemporaryFile(dir=folder, delete=False) as errors,
        ):
            self._process = server.start(MEDUSA_MAIN, words, folder=folder, environ=environ, log=errors, output=output)
        self._written = Path(output.name), Path(errors.name)
        self.pid, self.send_signal, self.kill = self._process.pid, self._process.send_signal, self._process.kill

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.returncode = self._process.wait(timeout)
        output, errors = (path.read_text() for path in self._written)
        return output, errors


@pytest.fixture
def batch(tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., Any]]:
    """Start a batch with the bundled model: forked, but for a ``stdin`` of its own."""
    started: list[Any] = []

    def start(*arguments: str | Path, stdin: Any = None, model: Path = EXAMPLE) -> Any:
        environ = plain_environ()
        environ |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        words = list(map(str, ["batch", "--model", model, "--node-socket", "none", *arguments]))
        if stdin is None:
            started.append(ForkedBatch(fork_server, words, environ, tmp_path))
        else:
            pipe = subprocess.PIPE
            started.append(
                subprocess.Popen(
                    [MEDUSA, *words], stdin=stdin, stdout=pipe, stderr=pipe, text=True, env=environ, cwd=tmp_path
                )
            )
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def finish(process: Any) -> tuple[int, str]:
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert output == ""
    assert "Traceback" not in errors
    return process.returncode, errors


def test_a_model_that_is_not_there_is_one_clear_error(batch: Callable[..., Any], tmp_path: Path) -> None:
    asked = write(tmp_path / "in.jsonl", [request("a")])
    status, errors = finish(batch("-i", asked, "-o", "out.jsonl", model=tmp_path / "nothing"))
    expected = f"medusa: {tmp_path}/nothing: expected a folder with a checkpoint, found nothing [Storage.NotFound]"
    assert (status, errors.splitlines()[-1]) == (1, expected)
    assert "did not answer" not in errors


def test_each_line_gets_a_result(batch: Callable[..., Any], tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "What does len return?"}], "max_tokens": 3}
    asked = write(
        tmp_path / "in.jsonl",
        [
            request("text"),
            {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {
                "custom_id": "new",
                "method": "POST",
                "url": "/v1/responses",
                "body": {"input": "ü", "max_output_tokens": 3},
            },
            "",
            "no json",
            request("refused", max_tokens=-1),
            request("elsewhere", "/v1/nothing"),
            request("text"),
            request("stream", stream=True),
        ],
    )
    status, errors = finish(batch("-i", asked, "-o", "out.jsonl"))
    assert status == 1
    assert "3 answered, 5 failed" in errors
    found = results(tmp_path / "out.jsonl")
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in found)
    assert len({one["id"] for one in found}) == len(found) == 8
    answered = {one["custom_id"]: one["response"] for one in found if one["response"] is not None}
    assert {name: one["status_code"] for name, one in answered.items()} == {
        "text": 200, "chat": 200, "new": 200, "refused": 400, "elsewhere": 404,
    }  # fmt: skip
    assert all(one["request_id"] for one in answered.values())
    assert answered["text"]["body"]["usage"]["completion_tokens"] == 4
    assert answered["chat"]["body"]["object"] == "chat.completion"
    assert answered["new"]["body"]["object"] == "response"
    assert answered["refused"]["body"]["error"]["param"] == "max_tokens"
    bad = {one["custom_id"]: one["error"] for one in found if one["error"] is not None}
    assert {name: one["code"] for name, one in bad.items()} == dict.fromkeys(
        [None, "text", "stream"], "invalid_request"
    )
    assert bad[None]["message"].startswith("line 5: expected a JSON object")
    assert bad["text"]["message"].startswith("line 8: expected a custom_id of its own")

    # With the same file, there is nothing left to do. Without the flag, results are not overwritten.
    status, errors = finish(batch("-i", asked, "-o", "out.jsonl", "--resume"))
    assert (status, "0 answered, 0 failed, 8 skipped" in errors) == (0, True)
    assert len(results(tmp_path / "out.jsonl")) == 8
    status, errors = finish(batch("-i", asked, "-o", "out.jsonl"))
    assert (status, "there are results already; --resume" in errors) == (2, True)


@pytest.mark.parametrize(("number", "status"), [
    (signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGKILL, -9),
])  # fmt: skip
def test_a_batch_that_was_ended_goes_on(batch: Callable[..., Any], tmp_path: Path, number: int, status: int) -> None:
    names = [f"r{n}" for n in range(30)]
    asked = write(tmp_path / "in.jsonl", [request(name, max_tokens=60) for name in names])
    output = tmp_path / "out.jsonl"
    first = batch("-i", asked, "-o", output, "--max-concurrency", "4")
    until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5)
    own = set(descendants(first.pid))
    first.send_signal(number)
    found, errors = finish(first)
    assert found == status
    assert number == signal.SIGKILL or "--resume goes on" in errors
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in own))
    before = output.read_bytes().count(b"\n")
    assert 5 <= before < 30
    with open(output, "a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "r2')  # as a machine that lost its power leaves it
    found, errors = finish(batch("-i", asked, "-o", output, "--resume"))
    assert (found, f"{before} skipped" in errors) == (0, True)
    assert sorted(one["custom_id"] for one in results(output)) == sorted(names)
    assert all(one["response"]["status_code"] == 200 for one in results(output))


def test_a_killed_batch_whose_output_is_in_a_store_goes_on(batch: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    names = [f"r{n}" for n in range(30)]
    asked = write(tmp_path / "in.jsonl", [request(name, max_tokens=60) for name in names])
    (folder := tmp_path / "store").mkdir()
    output = f"local://{folder}/out.jsonl"
    first = batch("-i", asked, "-o", output, "--max-concurrency", "4")

    def left() -> int:
        return sum(path.read_bytes().count(b"\n") for path in folder.glob("out.jsonl.*.new"))

    until(lambda: left() >= 5)
    own = set(descendants(first.pid))
    first.kill()
    finish(first)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in own))
    before = left()
    assert 5 <= before < 30
    status, errors = finish(batch("-i", asked, "-o", output))
    assert (status, "--resume uses them" in errors) == (2, True), errors
    status, errors = finish(batch("-i", asked, "-o", output, "--resume"))
    assert (status, f"{before} skipped" in errors) == (0, True), errors
    assert f"{before} results are taken from {output}" in errors
    assert sorted(one["custom_id"] for one in results(folder / "out.jsonl")) == sorted(names)


def test_a_request_waits_for_its_answer_though_a_bad_line_has_its_id(batch: Callable[..., Any], tmp_path: Path) -> None:
    asked = write(tmp_path / "in.jsonl", [request("a"), request("a"), request("a", stream=True), request("a")])
    assert finish(batch("-i", asked, "-o", "out.jsonl"))[0] == 1
    found = results(tmp_path / "out.jsonl")
    output = write(tmp_path / "part.jsonl", [one for one in found if one["error"] is not None][:2])  # stopped then
    status, errors = finish(batch("-i", asked, "-o", output, "--resume"))
    assert (status, "1 answered, 1 failed, 2 skipped" in errors) == (1, True), errors
    assert [one["response"] is None for one in results(output)].count(False) == 1
    assert len(results(output)) == 4
    write(tmp_path / "other.jsonl", [{"custom_id": 5, "error": None}])
    status, errors = finish(batch("-i", asked, "-o", "other.jsonl", "--resume"))
    assert (status, "expected results of a batch, found something else in line 1" in errors) == (2, True)


def test_an_engine_that_is_killed_loses_nothing(batch: Callable[..., Any], tmp_path: Path) -> None:
    asked = write(tmp_path / "in.jsonl", [request(f"r{n}", max_tokens=60) for n in range(30)])
    output = tmp_path / "out.jsonl"
    process = batch("-i", asked, "-o", output, "--max-concurrency", "4")
    until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3)
    os.kill(next(pid for pid, name in descendants(process.pid).items() if name == "engine"), signal.SIGKILL)
    assert finish(process)[0] == 0
    assert {one["response"]["status_code"] for one in results(output)} == {200}
    assert len(results(output)) == 30


def test_requests_from_a_store_and_from_stdin(batch: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    write(tmp_path / "in.jsonl", [request("a"), request("b")])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, output = f"http://127.0.0.1:{server.server_port}/in.jsonl", tmp_path / "out.jsonl"
        assert finish(batch("-i", url, "-o", f"local://{output}"))[0] == 0
        server.shutdown()
    assert {one["custom_id"] for one in results(output)} == {"a", "b"}
    status, errors = finish(batch("-i", "in.jsonl", "-o", f"local://{output}"))
    assert (status, "there are results already" in errors) == (2, True)
    with open(write(tmp_path / "more.jsonl", [request("b"), request("c")])) as stdin:
        assert finish(batch("-i", "-", "-o", f"local://{output}", "--resume", stdin=stdin))[0] == 0
    assert sorted(one["custom_id"] for one in results(output)) == ["a", "b", "c"]


@pytest.mark.parametrize("place", ["-", "pipe"])
def test_a_signal_ends_it_while_its_input_is_silent(batch: Callable[..., Any], tmp_path: Path, place: str) -> None:
    """A named pipe that nobody had opened to write to was once waited for without an end."""
    output = tmp_path / "out.jsonl"
    os.mkfifo(tmp_path / "pipe")
    process = batch("-i", place, "-o", "out.jsonl", stdin=subprocess.PIPE)
    until(output.exists)
    with contextlib.nullcontext(process.stdin) if place == "-" else open(tmp_path / place, "w") as pipe:
        pipe.write(json.dumps(request("a")) + "\n")
        pipe.flush()
        until(lambda: output.read_bytes().count(b"\n") == 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("-i", "none.jsonl", "-o", "out.jsonl"), 2, "none.jsonl: expected a file with requests that can be read"),
        (("-i", "in.jsonl", "-o", "nowhere/out.jsonl"), 2, "expected a file that can be written"),
        (("-i", "s3://bucket", "-o", "out.jsonl"), 2, "expected the URL of a file"),
        (("-i", "in.jsonl", "-o", "other.jsonl", "--resume"), 2, "expected results of a batch, found something else"),
        (("-i", "in.jsonl", "-o", "out.jsonl", "--max-concurrency", "0"), 2, "--max-concurrency"),
        (("-i", "in.jsonl", "-o", "out.jsonl", "--model", "missing"), 1, "expected a folder with a checkpoint"),
        (("-i", "in.jsonl", "-o", "out.jsonl", "--port", "80"), 2, "unrecognized arguments: --port"),
    ],
)
def test_what_cannot_begin_says_why(
    batch: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], status: int, text: str
) -> None:
    write(tmp_path / "in.jsonl", [request("a")])
    write(tmp_path / "other.jsonl", ['{"a": 1}'])
    found, errors = finish(batch(*arguments))
    assert (found, text in errors) == (status, True), errors
    assert results(tmp_path / "other.jsonl") == [{"a": 1}]
