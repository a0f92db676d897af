"""The two ends of the engine socket, over a real Unix socket; the engine's process is killed for real."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams, TokenLogprob
from medusa_runtime.engine.client import EngineClient
from medusa_runtime.engine.frames import (
    FrameReader,
    delta_from_frame,
    delta_to_frame,
    pack,
    request_from_frame,
    request_to_frame,
)
from medusa_runtime.engine.server import EngineServer
from medusa_runtime.errors import EngineError, LimitError, OverloadedError, RequestError
from spelling_engine import SpellingEngine
from waiting import until


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "engine"))
        listening.listen()
        yield listening


def fork_engine(listener: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        server = EngineServer(listener, SpellingEngine())  # type: ignore[arg-type]
        server.start()
        server.announce_ready()
        signal.pause()
        os._exit(0)
    return pid


@pytest.fixture
def engine(listener: socket.socket) -> Iterator[list[int]]:
    """Pids of engine processes; a test may kill them and append others."""
    pids = [fork_engine(listener)]
    yield pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.fixture
def client(listener: socket.socket) -> Iterator[EngineClient]:
    client = EngineClient(listener.getsockname())
    yield client
    client.close()


def request(prompt: str, request_id: str = "r1") -> GenerateRequest:
    return GenerateRequest(request_id, prompt, SamplingParams())


def kill(pids: list[int]) -> None:
    pid = pids.pop()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_deltas_arrive_in_order(engine: list[int], client: EngineClient) -> None:
    with client.generate(request("héllo")) as stream:
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == "héllo"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].completion_tokens == 5


def test_many_requests_share_one_connection(engine: list[int], client: EngineClient) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        with client.generate(request(f"answer {number}", f"r{number}")) as stream:
            answers[number] = "".join(delta.text for delta in stream)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"answer {number}" for number in range(50)}


def test_refusals_are_raised_with_their_kind(engine: list[int], client: EngineClient) -> None:
    with pytest.raises(RequestError, match="anything but 'refuse'"):
        client.generate(request("refuse")).get(60)
    with pytest.raises(OverloadedError) as caught:
        client.generate(request("busy")).get(60)
    assert caught.value.retry_after_s == 7.5


def test_an_exception_of_one_request_ends_no_other(engine: list[int], client: EngineClient) -> None:
    other = client.generate(request("stall", "r2"))
    assert other.get(60) is not None
    with pytest.raises(RequestError, match="Missing"):
        client.generate(request("unknown")).get(60)
    with pytest.raises(RequestError, match="Missing"):
        client.tokenize("unknown")
    assert other.get(0.1) is None


def test_get_returns_none_while_nothing_came_and_close_cancels(engine: list[int], client: EngineClient) -> None:
    stream = client.generate(request("stall", "slow"))
    first = stream.get(60)
    assert first is not None
    assert stream.get(0.01) is None
    stream.close()
    assert client.stats() == {"cancelled": ["slow"]}


def test_a_long_prompt_holds_up_nobody_and_can_be_cancelled(engine: list[int], client: EngineClient) -> None:
    long = client.generate(request("slow" * 20_000, "long"))
    assert "".join(delta.text for delta in client.generate(request("short", "r2"))) == "short"
    long.close()
    for _ in range(6000):
        if client.stats() == {"cancelled": ["long", "long"]}:
            return
        time.sleep(0.01)
    pytest.fail("it was not cancelled once the engine knew it")


def test_a_long_text_to_tokenize_holds_up_nobody(engine: list[int], client: EngineClient) -> None:
    text = "slow" * 20_000
    found: list[int] = []
    calling = threading.Thread(target=lambda: found.extend(client.tokenize(text)), daemon=True)
    calling.start()
    while not client._calls:
        time.sleep(0.001)
    running = client.generate(request("stall", "r2"))
    assert running.get(20) is not None, "it waits for the text of another caller"
    running.close()  # the engine sees it while the text is being tokenized
    calling.join(60)
    assert len(found) == len(text)
    with pytest.raises(RequestError, match="knows no frame"):
        client._call("close", text=text)


def test_what_is_too_large_for_a_frame_ends_no_other_request(engine: list[int], client: EngineClient) -> None:
    other = client.generate(GenerateRequest("other", "stall", SamplingParams()))
    assert next(iter(other)).text == "s"
    with pytest.raises(RequestError, match="at most 67108864 bytes"):
        client.tokenize("large")
    with pytest.raises(RequestError, match="at most 67108864 bytes"):
        client.tokenize("x" * (65 << 20))
    with pytest.raises(RequestError, match="at most 67108864 bytes"):
        list(client.generate(GenerateRequest("long", "x" * (65 << 20), SamplingParams())))
    assert other.get(0.1) is None
    assert client.tokenize("a") == [97]


def test_requests_sent_before_the_engine_is_up_are_answered(listener: socket.socket, client: EngineClient) -> None:
    stream = client.generate(request("early"))
    assert stream.get(0.05) is None
    assert not client.ready
    pid = fork_engine(listener)
    try:
        assert "".join(delta.text for delta in stream) == "early"
        assert client.wait_ready(5).engine == "spelling"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_crash_ends_running_requests_with_an_error_and_the_next_engine_serves(
    engine: list[int], client: EngineClient, listener: socket.socket
) -> None:
    running = client.generate(request("stall"))
    assert running.get(60) is not None
    kill(engine)
    with pytest.raises(EngineError, match="being restarted"):
        running.get(60)
    held = client.generate(request("again", "r2"))
    engine.append(fork_engine(listener))
    assert "".join(delta.text for delta in held) == "again"


def test_closing_a_client_ends_requests_that_no_engine_has_begun(listener: socket.socket, client: EngineClient) -> None:
    waiting = client.generate(request("hello"))
    client.close()
    with pytest.raises(EngineError, match="closed"):
        assert waiting.get(10) is not None, "it waits for ever"
    with pytest.raises(EngineError, match="closed"):
        client.generate(request("hello", "r2"))


def test_an_adapter_that_is_dropped_while_it_is_sent_keeps_its_descriptors_until_then(
    engine: list[int], client: EngineClient
) -> None:
    """Their numbers would be another file's by then."""
    client.wait_ready(10)
    read, write = os.pipe()
    os.close(write)
    send, begun, go, sent = client._send, threading.Event(), threading.Event(), list[str]()

    def slowly(connection: Any, frame: Any, descriptors: Any = ()) -> None:
        if frame["type"] == "adapter":
            begun.set()
            go.wait(10)
            os.fstat(descriptors[0])
        sent.append(frame["type"])
        send(connection, frame, descriptors)

    client._send = slowly  # type: ignore[method-assign]
    adding = threading.Thread(target=client.add_adapter, args=("one", [read]))
    dropping = threading.Thread(target=client.drop_adapter, args=("one",))
    adding.start()
    assert begun.wait(10)
    dropping.start()
    dropping.join(0.2)
    go.set()
    adding.join()
    dropping.join()
    assert sent == ["adapter", "call"]
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(read)


def test_calls_answer_and_fail_clearly(engine: list[int], client: EngineClient) -> None:
    assert client.tokenize("ab") == [97, 98]
    assert client.detokenize([97, 98]) == "ab"
    with pytest.raises(RequestError, match="could not be read"):
        client._call("tokenize", wrong=1)
    with pytest.raises(RequestError, match="knows no frame"):
        client._call("close")


def test_a_client_that_vanishes_has_its_requests_cancelled(engine: list[int], listener: socket.socket) -> None:
    leaving = EngineClient(listener.getsockname())
    assert leaving.generate(request("stall", "left-behind")).get(60) is not None
    leaving.close()
    other = EngineClient(listener.getsockname())
    try:
        other.wait_ready(5)
        for _ in range(6000):
            if other.stats() == {"cancelled": ["left-behind"]}:
                return
            threading.Event().wait(0.01)
        pytest.fail(f"the request of the lost client still runs: {other.stats()}")
    finally:
        other.close()


def test_an_engine_without_free_descriptors_takes_clients_again_later(
    engine: list[int], listener: socket.socket, client: EngineClient
) -> None:
    assert client.wait_ready(30)
    first = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    limits = resource.prlimit(engine[0], resource.RLIMIT_NOFILE)
    resource.prlimit(engine[0], resource.RLIMIT_NOFILE, (1, limits[1]))
    for each in first:
        each.connect(listener.getsockname())
    assert len(list(client.generate(request("hello")))) == 6
    time.sleep(0.2)  # for its refusals
    resource.prlimit(engine[0], resource.RLIMIT_NOFILE, limits)
    for each in first:
        with each:
            each.settimeout(30)
            assert each.recv(1)


def test_an_embedding_that_nobody_waits_for_is_cancelled(
    engine: list[int], listener: socket.socket, client: EngineClient
) -> None:
    """Its texts would be computed after the client has left."""

    def leave() -> None:
        nonlocal checks
        checks += 1
        if checks > 3:
            raise ConnectionError("the function's caller has left")

    checks = 0
    with pytest.raises(ConnectionError):
        client.embed(["one"], wait_check=leave)
    until(lambda: client.stats()["cancelled"] == ["one"])
    other = EngineClient(listener.getsockname())

    def embed() -> None:
        with pytest.raises(EngineError):
            other.embed(["two"])

    embedding = threading.Thread(target=embed)
    embedding.start()
    until(lambda: bool(other._calls))
    time.sleep(0.1)
    other.close()
    embedding.join()
    until(lambda: client.stats()["cancelled"] == ["one", "two"])


@pytest.mark.parametrize("after", [0, 1])
def test_an_engine_without_room_for_a_thread_takes_clients_again_later(
    listener: socket.socket, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its accepting thread once ended, so that no client was ever taken again."""
    server = EngineServer(listener, SpellingEngine())  # type: ignore[arg-type]
    server.start()
    server.announce_ready()
    client = EngineClient(listener.getsockname())
    assert client.wait_ready(30)
    list(client.generate(request("long", "r1")))  # so that both threads of this connection run
    start, left = threading.Thread.start, [after]

    def start_few(thread: threading.Thread) -> None:
        if thread.name.startswith("engine-"):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_few)
        with socket.socket(socket.AF_UNIX) as turned_away:
            turned_away.settimeout(30)
            turned_away.connect(listener.getsockname())
            while turned_away.recv(1 << 16):
                pass
        with pytest.raises(LimitError, match="no further process or thread could be made"):
            list(client.generate(request("long" * (1 << 15), "r2")))  # would get a thread of its own
    with socket.socket(socket.AF_UNIX) as taken:
        taken.settimeout(30)
        taken.connect(listener.getsockname())
        assert taken.recv(1)
    client.close()
    server.close()


def test_frames_round_trip() -> None:
    asked = GenerateRequest(
        "a", (1, 2), SamplingParams(max_tokens=None, stop=("x",), logit_bias={5: -1.0}, top_k=3), False
    )
    assert request_from_frame(request_to_frame(asked)) == asked
    delta = Delta("a", "\ud800t", (1,), (TokenLogprob(1, "t", -0.5, ((1, "t", -0.5),)),), "stop", "x", 3, 4, ("c", "m"))
    assert delta_from_frame(json.loads(pack(delta_to_frame(delta))[4:].decode("utf-8", "surrogatepass"))) == delta


class WithHttp(SpellingEngine):
    """Its own server echoes one line, once it is up."""

    def __init__(self) -> None:
        super().__init__()
        self.up = threading.Event()

    def open_http(self) -> Callable[[socket.socket], None]:
        self.up.wait(10)

        def take(connection: socket.socket) -> None:
            with connection:
                connection.sendall(connection.recv(100).upper())

        return take


def test_a_connection_is_handed_to_the_engines_own_server_once_it_is_up(listener: socket.socket) -> None:
    engine = WithHttp()
    server = EngineServer(listener, engine)  # type: ignore[arg-type]
    server.start()
    looked: list[bool] = []

    def look() -> None:
        looked.append(True)
        engine.up.set()

    client = EngineClient(str(listener.getsockname()))
    for _ in range(2):  # the second time the answer comes at once
        with client.connect_http(look) as connection:
            server.announce_ready()  # frames for other clients; this one speaks something else now
            connection.sendall(b"get / http/1.1")
            assert connection.recv(100) == b"GET / HTTP/1.1"
            assert connection.recv(100) == b""
    assert looked
    client.close()


def test_an_engine_without_a_server_refuses_such_a_connection(listener: socket.socket) -> None:
    EngineServer(listener, SpellingEngine()).start()  # type: ignore[arg-type]
    client = EngineClient(str(listener.getsockname()))
    with pytest.raises(RequestError, match="no HTTP server of its own"):
        client.connect_http(lambda: None)
    client.close()


def test_a_slow_call_of_an_engine_holds_up_nothing_else(listener: socket.socket) -> None:
    """Such as the metrics of a vLLM that hangs."""
    goes_on = threading.Event()

    class Slow(SpellingEngine):
        slow_calls = ("stats",)

        def stats(self) -> dict[str, Any]:
            goes_on.wait(60)
            return super().stats()

    EngineServer(listener, Slow()).start()  # type: ignore[arg-type]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(listener.getsockname())
        for name, arguments in (("stats", {}), ("detokenize", {"token_ids": [97]})):
            connection.sendall(pack({"type": "call", "id": name, "method": name, "arguments": arguments}))
        reader = FrameReader(connection)
        assert [(reader.read() or {}).get("id") for _ in range(2)] == [None, "detokenize"]
        goes_on.set()
        assert (reader.read() or {})["id"] == "stats"


def test_slow_calls_and_connections_take_no_more_threads_than_an_engine_has_for_them(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of a node agent's engine may be a stranger, and each thread takes a process id of all others."""
    monkeypatch.setattr("medusa_runtime.engine.server._MOST_CALLS", 2)
    monkeypatch.setattr("medusa_runtime.engine.server._MOST_CONNECTIONS", 2)
    EngineServer(listener, SpellingEngine()).start()  # type: ignore[arg-type]

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(listener.getsockname())
        return connection

    with connect() as one, connect() as another, connect() as third:
        assert third.recv(1) == b"", "it is closed"
        reader, calls = FrameReader(one), [{"type": "call", "id": f"{n}", "method": "embed"} for n in range(3)]
        assert (reader.read() or {})["type"] == "hello"
        for call in calls:
            one.sendall(pack({**call, "arguments": {"inputs": []}}))
        refused = reader.read() or {}
        assert (refused["id"], refused["code"]) == ("2", "Engine.Overloaded")
        one.sendall(pack({"type": "cancel", "id": "0"}))
        assert (reader.read() or {})["id"] == "0"
        time.sleep(0.1)  # its thread ends a moment after its answer
        one.sendall(pack({**calls[2], "arguments": {"inputs": []}}))
        another.sendall(pack({"type": "call", "id": "s", "method": "stats", "arguments": {}}))
        reader = FrameReader(another)
        assert [(reader.read() or {})["type"] for _ in range(2)] == ["hello", "result"], "quick calls need none"
