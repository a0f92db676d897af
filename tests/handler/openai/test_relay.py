"""Requests passed on to an engine's own HTTP server, which here is a socket that sends any bytes."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest
from scripted_server import Answer, ScriptedServer

Serve = Callable[..., Any]
_OK = b"HTTP/1.1 200 OK\r\n"
_STREAM = _OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def relayed(
    serve: Serve, answer: Answer, *, kept: bool = False, **options: Any
) -> tuple[http.client.HTTPResponse, Any, Any]:
    """Return what a client gets of a server's answer, and the function process.

    The body is None where it is cut off.
    """
    with ScriptedServer(lambda head: answer, kept=kept) as server:
        served = serve(http_port=server.port, **options)
        with contextlib.closing(served.connect()) as connection:
            connection.request("GET", "/v1/of-the-engine")
            response = connection.getresponse()
            try:
                return response, response.read(), served
            except http.client.IncompleteRead:
                return response, None, served


def test_a_stream_comes_whole(serve: Serve) -> None:
    response, body, _ = relayed(serve, [_STREAM, b"9\r\ndata: 1\n\n\r\n", b"0\r\n\r\n"])
    assert (response.status, response.headers["Content-Type"], body) == (200, "text/event-stream", b"data: 1\n\n")
    # vLLM sends neither, and a proxy such as nginx would keep tokens back until a buffer is full.
    assert (response.headers["X-Accel-Buffering"], response.headers["Cache-Control"]) == ("no", "no-cache")


def test_an_answer_without_a_type_gets_none(serve: Serve) -> None:
    """vLLM answers so when it has loaded an adapter, with the adapter's name."""
    response, body, _ = relayed(serve, _OK + b"Content-Length: 6\r\n\r\n<b>hi!")
    assert (response.status, response.headers["Content-Type"], body) == (200, None, b"<b>hi!")


@pytest.mark.parametrize(
    "sent",
    [
        _STREAM + b"9\r\ndata: 1\n\n\r\n",
        _STREAM + b"9\r\ndata: 1\n\n\r\n9\r\ndata",
        _OK + b"Content-Length: 10\r\n\r\ndata",
    ],
)
def test_an_answer_that_breaks_off_is_no_whole_one(serve: Serve, sent: bytes) -> None:
    response, body, served = relayed(serve, sent)
    assert (response.status, body) == (200, None)
    assert "is cut off: the engine's HTTP server broke off" in served.output()
    assert "Traceback" not in served.output()


def test_a_stream_whose_time_is_over_is_no_whole_one(serve: Serve) -> None:
    _, body, served = relayed(serve, _STREAM + b"9\r\ndata: 1\n\n\r\n", kept=True, timeout_s=1)
    assert body is None
    assert "Traceback" not in served.output()


def test_a_server_that_says_nothing_is_an_engine_that_failed(serve: Serve) -> None:
    response, body, _ = relayed(serve, b"")
    assert (response.status, json.loads(body)["error"]["code"]) == (503, "Engine.Failed")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": "3"}),
        ("/v1/completions", {"prompt": "a", "stream": "true"}),
        ("/v1/completions", {"prompt": "a", "n": 200}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"structural_tag": "{}"}}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": "none", "tools": [
            {"type": "function", "function": {"name": "get"}}
        ]}),
        ("/", {"prompt": "a", "temperature": "0"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": "3"}),
        ("/v1/responses", {"input": "a", "reasoning": {"summary": "detailed"}}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "get"}], "tool_choice": "none"}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}),
    ],
)  # fmt: skip
def test_values_that_our_routes_refuse_are_left_to_the_engines_server(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    """vLLM's server takes numbers in text, for example."""
    with ScriptedServer(lambda head: _OK + b"Content-Length: 2\r\n\r\n{}") as server:
        served = serve(http_port=server.port, files={"chat_template.jinja": "{{ messages }}{{ tools }}"})
        assert served.request("POST", path, body)[0] == 200
        assert len(server.requests) == 1
        assert served.request("POST", path, body | {"unknown": 1})[0] == 400  # vLLM's server would ignore it
        assert served.request("POST", path, body | {"model": "another"})[0] == 404
        assert len(server.requests) == 1


@pytest.mark.parametrize("route", ["/v1/embeddings", "/classify", None])
def test_an_input_at_the_root_goes_to_the_route_that_the_engines_server_has(serve: Serve, route: str | None) -> None:
    """vLLM has only those for what its model does, and 404 for the others."""

    def answer(head: bytes) -> bytes:
        there = route is not None and head.startswith(f"POST {route} ".encode())
        return (_OK if there else b"HTTP/1.1 404 Not Found\r\n") + b"Content-Length: 2\r\n\r\n{}"

    with ScriptedServer(answer) as server:
        served = serve(http_port=server.port, files={"chat_template.jinja": "{{ messages[-1].content }}"})
        status, found, _ = served.request("POST", "/", {"input": "say:hi"})
    assert status == 200
    assert found == b"{}" if route is not None else found["object"] == "response"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": "a", "bad_words": ["x"]}),
    ],
)
def test_fields_that_our_routes_do_not_support_are_left_to_the_engines_server(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    with ScriptedServer(lambda head: _OK + b"Content-Length: 2\r\n\r\n{}") as server:
        served = serve(http_port=server.port)
        assert served.request("POST", path, body)[0] == 200
        assert served.request("POST", path, body | {"unknown": 1})[0] == 400
        assert len(server.requests) == 1


def test_what_both_refuse_has_our_error_and_what_only_theirs_supports_has_theirs(serve: Serve) -> None:
    """vLLM's for a message without a content lists 19 errors of its parser's classes."""
    theirs = b'{"error": {"message": "19 validation errors", "code": 400}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
    with ScriptedServer(lambda _: head + b"Content-Length: %d\r\n\r\n%s" % (len(theirs), theirs)) as server:
        served = serve(http_port=server.port)
        for asked in ({"temperature": "hot"}, {"temperature": "hot", "stream": True}):
            status, answer, _ = served.request("POST", "/v1/completions", {"prompt": "a"} | asked)
            assert (status, answer["error"]["param"]) == (400, "temperature")
            assert answer["error"]["message"] == 'temperature: expected a number from 0 to 2, found "hot"'
        for asked in (
            {"prompt_logprobs": 99},
            {"response_format": {"type": "structural_tag", "format": 3}},
            {"structured_outputs": {"structural_tag": 3}},
        ):
            status, answer, _ = served.request("POST", "/v1/completions", {"prompt": "a"} | asked)
            assert (status, answer["error"]["message"]) == (400, "19 validation errors")
        assert len(server.requests) == 5
