"""What `medusa cluster logs` prints, of nodes that may log and answer anything."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.cli.main import main

Answers = Callable[[dict[str, Any]], dict[str, Any]]


def two_nodes() -> dict[str, Any]:
    return {"ok": {"nodes": [{"name": "a"}, {"name": "b"}]}}


@pytest.fixture
def node() -> Iterator[Callable[..., Path]]:
    """A node server whose cluster has the nodes a and b. ``answers`` answers for the logs. Gives its folder."""
    folder = Path(tempfile.mkdtemp(prefix="m"))  # a short path, for the socket

    def start(answers: Answers, status: Callable[[], dict[str, Any]] = two_nodes) -> Path:
        listener = closed.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "control.sock"))
        listener.listen()

        def serve_one(connection: socket.socket) -> None:
            with connection, connection.makefile("rwb") as lines:
                call = json.loads(lines.readline())
                found = status() if call["call"] == "status" else answers(call["arguments"])
                lines.write(json.dumps(found).encode() + b"\n")

        def serve() -> None:
            with ThreadPoolExecutor(8) as pool:
                while True:
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        return
                    pool.submit(serve_one, connection)

        thread = threading.Thread(target=serve)
        thread.start()
        closed.callback(thread.join)
        closed.callback(listener.shutdown, socket.SHUT_RDWR)
        return folder

    with ExitStack() as closed:
        yield start
    shutil.rmtree(folder)


def test_names_change_no_terminal(node: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = node(lambda _: {"ok": {"\x1b]0;title\x07\n": 3}})
    assert main(["cluster", "logs", "--dir", str(folder)]) == 0
    assert capsys.readouterr().out == "a/?]0;title??  3 bytes\nb/?]0;title??  3 bytes\n"


@pytest.mark.parametrize("code", ["config_error", "engine_error", "no_such_code"])
def test_a_node_with_an_error_is_left_out(
    node: Callable[..., Path], capsys: pytest.CaptureFixture[str], code: str
) -> None:
    error = {"error": {"code": code, "message": "\x1b[31mno"}}
    folder = node(lambda given: error if given["node"] == "a" else {"ok": {"agent": 3}})
    assert main(["cluster", "logs", "--dir", str(folder)]) == 0
    found = capsys.readouterr()
    assert found.out == "b/agent  3 bytes\n"
    assert found.err.startswith("a is left out: ")
    assert found.err.endswith("?[31mno\n")


def test_nodes_are_asked_side_by_side(node: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Each answer waits for the other question, as if both nodes hung."""
    both = threading.Barrier(2, timeout=60)

    def answers(given: dict[str, Any]) -> dict[str, Any]:
        both.wait()
        return {"ok": {"text": given["node"], "start": 0, "end": 1} if "log" in given else {"instance-m": 1}}

    assert main(["cluster", "logs", "m", "--dir", str(node(answers))]) == 0
    assert capsys.readouterr() == ("a/instance-m: a\nb/instance-m: b\n", "")


@pytest.mark.parametrize(("lines", "shown"), [("2", "one\nkilled her\n"), ("1", "killed her\n"), ("0", "")])
def test_a_last_line_without_an_end_is_shown(
    node: Callable[..., Path], capsys: pytest.CaptureFixture[str], lines: str, shown: str
) -> None:
    text = "none\none\nkilled her"
    folder = node(lambda given: {"ok": {"text": text, "start": 0, "end": 19} if "log" in given else {"agent": 19}})
    assert main(["cluster", "logs", "a/agent", "--lines", lines, "--dir", str(folder)]) == 0
    assert capsys.readouterr().out == shown


def test_following_waits_for_a_controller_that_is_away(node: Callable[..., Path]) -> None:
    away = {"error": {"code": "Cluster.NoController", "message": "no controller answers"}}
    statuses = [two_nodes(), away, away]
    texts = ["first\n", "second\n"]

    def answers(given: dict[str, Any]) -> dict[str, Any]:
        if given["node"] == "b":
            return {"ok": {}}
        if "log" not in given:
            return {"ok": {"agent": 6 if len(texts) == 2 else 13}}
        start, end = (0, 6) if given["after"] is None else (6, 13)
        return {"ok": {"text": texts.pop(0), "start": start, "end": end}}

    folder = node(answers, lambda: statuses.pop(0) if statuses else two_nodes())
    shown, notes = followed(folder, 2)
    assert shown == ["a/agent: first\n", "a/agent: second\n"]
    assert notes == "waiting: no controller answers; running instances go on meanwhile\n"


def test_following_says_how_much_was_left_out(node: Callable[..., Path]) -> None:
    texts = [("first\nhal", 0, 9), ("last\n", 300_009, 300_014)]

    def answers(given: dict[str, Any]) -> dict[str, Any]:
        if given["node"] == "b":
            return {"ok": {}}
        if "log" not in given:
            return {"ok": {"agent": texts[0][2]}}
        return {"ok": dict(zip(("text", "start", "end"), texts.pop(0) if len(texts) > 1 else texts[0], strict=True))}

    shown, notes = followed(node(answers), 3)
    assert shown == ["a/agent: first\n", "a/agent: hal\n", "a/agent: last\n"]
    assert notes == "a/agent: 300 kB were left out; more came at once than is shown\n"


def followed(folder: Path, lines: int) -> tuple[list[str], str]:
    """Follow the logs of the node a until so many lines are shown. Return these, and what was noted."""
    command = [sys.executable, "-m", "medusa_adapters.cli.main", "cluster", "logs", "a", "--follow"]
    with subprocess.Popen(
        [*command, "--dir", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        shown = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        return shown, process.stderr.read()
