"""Knative's container contract and the CloudEvents of its Eventing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., Any]
BINARY = {"ce_specversion": "1.0", "ce_id": "7", "ce_type": "asked", "ce_source": "/test"}
STRUCTURED = {"specversion": "1.0", "id": "7", "type": "asked", "source": "/test", "data": {"name": "you"}}
EVENT = "application/cloudevents+json"
JSON = {"content_type": "application/json"}


@pytest.fixture(scope="module")
def plain(launch_module: Launch) -> Any:
    return launch_module(handler="function/handler.py", K_SERVICE="hello")


@pytest.fixture(scope="module")
def events(launch_module: Launch) -> Any:
    return launch_module(handler="cloudevent/handler.py:handle", K_SERVICE="hello", K_REVISION="hello-1")


def test_an_event_gets_a_reply_event(events: Any) -> None:
    binary = events.request("POST", "/", {"name": "you"}, **BINARY)
    structured = events.request("POST", "/", json.dumps(STRUCTURED).encode(), content_type=EVENT)
    for answer in (binary, structured):
        assert answer.status == 200
        assert answer.json == {"got": {"name": "you"}}
        assert answer.headers["ce-id"] == "r-7"
        assert (answer.headers["ce-specversion"], answer.headers["ce-type"]) == ("1.0", "reply")


def test_a_plain_function_gets_the_data_and_answers_with_an_event(plain: Any) -> None:
    for _ in range(2):  # a duplicate gets the same answer
        for body, headers in (({"name": "you"}, BINARY), (json.dumps(STRUCTURED).encode(), {"content_type": EVENT})):
            answer = plain.request("POST", "/", body, **headers)
            assert (answer.status, answer.json["hello"]) == (200, "you")
            assert (answer.headers["ce-type"], answer.headers["ce-source"]) == ("asked.reply", "/hello")
            assert answer.headers["ce-id"] == "7-reply"


def test_a_reply_to_a_reply_is_none(plain: Any) -> None:
    again = BINARY | {"ce_type": "asked.reply", "ce_source": "/hello"}
    answer = plain.request("POST", "/", {"name": "you"}, **again)
    assert (answer.status, answer.body) == (202, b"")


def test_two_functions_do_not_answer_each_other_for_ever(launch: Launch, plain: Any) -> None:
    other, event = launch(handler="function/handler.py", K_SERVICE="other"), dict(BINARY)
    for count in range(1, 20):
        answer = (plain, other)[count % 2].request("POST", "/", {"name": "you"}, **event)
        if answer.status == 202:
            break
        assert answer.status == 200
        event = BINARY | {f"ce_{name}": answer.headers[f"ce-{name}"] for name in ("id", "source", "type")}
    assert count == 9
    assert event["ce_type"] == "asked" + ".reply" * 8


def test_an_attribute_that_no_header_can_have_is_refused(plain: Any) -> None:
    for name in ("id", "type", "source", "extra"):
        event = json.dumps(STRUCTURED | {name: "/" + "a" * 8190}).encode()
        answer = plain.request("POST", "/", event, content_type=EVENT)
        assert answer.status == 400, name
        assert b"attributes of at most 8190 bytes" in answer.body
    event = json.dumps(STRUCTURED | {"extra": "a" * 8000}).encode()
    assert plain.request("POST", "/", event, content_type=EVENT).status == 200


def test_no_result_is_accepted(launch: Launch) -> None:
    quiet = launch(handler="results/handler.py", K_SERVICE="hello")
    answer = quiet.request("POST", "/?what=none", {"a": 1}, **BINARY)
    assert (answer.status, answer.body) == (202, b"")
    assert quiet.request("POST", "/?what=none", {"a": 1}).status == 204


@pytest.mark.parametrize(
    ("body", "headers", "found"),
    [
        (b'{"specversion": "1.0", "id"', {"content_type": EVENT}, "invalid JSON at line 1, column 28"),
        (b"[" * 100_000, {"content_type": EVENT}, "something else"),
        (b'{"specversion": "1.0", "id": "1", "type": "t"}', {"content_type": EVENT}, "one without a valid source"),
        (b"\xff\xfe", {"content_type": EVENT}, "something else"),
        (b"[]", {"content_type": EVENT}, "something else"),
        (b"<event/>", {"content_type": "application/cloudevents+xml"}, "invalid JSON at line 1, column 1"),
        (b"{}", JSON | {"ce_specversion": "1.0", "ce_id": "1"}, "one without a valid source and type"),
        (b"{}", JSON | BINARY | {"ce_specversion": "9.9"}, "one without a valid specversion"),
        (b"{broken", JSON | BINARY, "invalid JSON at line 1, column 2"),
    ],
)
def test_an_event_that_is_none_is_refused(events: Any, body: bytes, headers: dict[str, str], found: str) -> None:
    answer = events.request("POST", "/", body, **headers)
    assert answer.status == 400, answer.body
    assert answer.json["error"] == f"expected a CloudEvent 1.0, found {found}"


def test_a_batch_is_refused(events: Any) -> None:
    answer = events.request("POST", "/", b"[]", content_type="application/cloudevents-batch+json")
    assert answer.status == 415


def test_options_allow_post(plain: Any) -> None:
    answer = plain.request("OPTIONS", "/", WebHook_Request_Origin="eventing.example")
    assert answer.status == 204
    assert "POST" in answer.headers["allow"]
    assert answer.headers["webhook-allowed-origin"] == "eventing.example"


def test_requests_without_events_are_as_everywhere(plain: Any) -> None:
    answer = plain.request("POST", "/some/path?q=1", {"name": "me"})
    assert answer.json == {"hello": "me", "method": "POST", "path": "/some/path", "query": {"q": "1"}}
    assert "ce-id" not in answer.headers


def test_streams_end_with_done_and_beat_while_silent(launch: Launch) -> None:
    streaming = launch("--heartbeat-s", "0.3", handler="streaming/handler.py", K_SERVICE="hello")
    answer = streaming.request("POST", "/", b"slow")
    assert b": waiting\n\n" in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_probes_answer_while_the_function_loads(launch: Launch) -> None:
    loading = launch(handler="slow_load/handler.py:Handler", K_SERVICE="hello", wait=False)
    assert loading.request("GET", "/livez").status == 200
    assert loading.request("GET", "/readyz").status == 503
    held: list[Any] = []
    thread = threading.Thread(target=lambda: held.append(loading.request("POST", "/", b"")))
    thread.start()
    loading.until(lambda: loading.metric("medusa_requests_held") == 1)
    (loading.folder / "go").touch()
    thread.join()
    assert (held[0].status, held[0].body) == (200, b"loaded")


def test_held_requests_begin_in_order(launch: Launch) -> None:
    loading = launch("--max-concurrency", "1", handler="slow_load/handler.py:Numbered", K_SERVICE="hello", wait=False)
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        answers[number] = loading.request("POST", "/", b"").body

    threads = []
    for number in range(6):
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
        loading.until(lambda count=number + 1: loading.metric("medusa_requests_held") == count)
    (loading.folder / "go").touch()
    for thread in threads:
        thread.join()
    assert [answers[number] for number in range(6)] == [str(number).encode() for number in range(6)]


def test_http_1_0_clients_and_chunks(plain: Any) -> None:
    body = b'{"name": "old"}'
    head = b"POST / HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert b'"hello": "old"' in plain.raw(head + body)
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert b'"hello": "old"' in plain.raw(chunked + b"8\r\n" + body[:8] + b"\r\n7\r\n" + body[8:] + b"\r\n0\r\n\r\n")
    answer = plain.raw(chunked + b"zz\r\nabc\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"error"' in answer
    with socket.create_connection(("127.0.0.1", plain.port)) as vanishing:
        vanishing.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
    assert plain.request("POST", "/", {"name": "next"}).status == 200
    plain.until(lambda: plain.metric("medusa_requests_in_flight") == 0)
    assert "Traceback" not in plain.output()
