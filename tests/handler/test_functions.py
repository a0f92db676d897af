"""What user code may be, and what its results and errors become."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]
TEXT = {"Content-Type": "text/plain"}
LOG = "the log has the details under request id"


def events(data: bytes) -> list[str]:
    return [
        "\n".join(line.removeprefix("data: ") for line in block.split("\n"))
        for block in data.decode().split("\n\n")
        if block.startswith("data:")
    ]


def test_a_function(serve: Serve) -> None:
    served = serve(handler="function/handler.py:handle")
    status, answer, headers = served.request("PUT", "/a/b?x=1", {"name": "you"}, {"X-Request-Id": "id-7"})
    assert status == 200
    assert answer == {"hello": "you", "method": "PUT", "path": "/a/b", "query": {"x": "1"}}
    assert headers["x-request-id"] == "id-7"
    assert served.request("POST", "/", b"{nope")[:2] == (400, served.request("POST", "/", b"{nope")[1])
    assert "JSON" in served.request("POST", "/", b"{nope")[1]["error"]
    assert served.request("POST", "/", b"")[0] == 400
    served.wait_ready()


def test_a_class_with_a_lifecycle(serve: Serve) -> None:
    served = serve(handler="lifecycle/handler.py", max_concurrency=3)  # the default name is found
    assert served.request("POST", "/", b"hi", TEXT)[1] == b"at most 3: hi!"
    assert served.stop() == 0
    assert (served.log.parent / "closed").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_code_that_becomes_another_user_goes_on_serving(serve: Serve) -> None:
    served = serve(handler="other_user/handler.py:handle")
    first = served.request("POST", "/", {"wait_s": 2.5})[1]  # in which the worker's loop gives several signs of life
    assert first["user"] == 65534
    assert served.request("POST", "/", {"wait_s": 0})[1] == first


def test_code_that_loads_for_long_is_reported_with_its_place(serve: Serve) -> None:
    served = serve(handler="slow_load/handler.py:Handler", slow_s=0.2)
    served.until(lambda: "has been loading for 0.2 s, and requests wait for it; it is at " in served.output())
    assert re.search(r"slow_load/handler\.py, line [89]\n", served.output())
    (served.log.parent / "go").touch()
    assert served.request("POST", "/", b"")[1] == b"loaded"


def test_asynchronous_code_runs_in_one_loop(serve: Serve) -> None:
    served = serve(handler="asynchronous/handler.py:Handler")
    assert served.request("POST", "/", b"x", TEXT)[1] == {"got": "x"}
    status, data, headers = served.request("POST", "/", b"stream", TEXT)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-cache")
    assert events(data) == ['{"number": 0}', '{"number": 1}', '{"number": 2}', "[DONE]"]
    connection = served.connect()
    connection.request("POST", "/", b"forever", TEXT)
    served.until((served.log.parent / "began").exists)
    connection.close()
    served.until((served.log.parent / "cancelled").exists)


def test_a_generator_streams(serve: Serve) -> None:
    served = serve(handler="streaming/handler.py:handle", heartbeat_s=0.2)
    assert events(served.request("POST", "/", b"", TEXT)[1]) == ["one\ntwo", '{"three": 3}', "[DONE]"]
    assert served.request("POST", "/", b"early", TEXT)[:2] == (418, {"error": "no coffee"})
    late = events(served.request("POST", "/", b"late", TEXT)[1])
    assert late[0] == "one\ntwo"
    assert "error" in json.loads(late[1])
    assert late[2] == "[DONE]"
    assert "secret" not in "".join(late)
    assert "RuntimeError: secret detail" in served.output()
    slow = served.request("POST", "/", b"slow", TEXT)[1]
    assert slow.count(b": waiting\n\n") >= 2
    assert events(slow)[-2:] == ['{"three": 3}', "[DONE]"]


def test_a_generator_is_closed_when_the_client_leaves(serve: Serve) -> None:
    served = serve(handler="streaming/handler.py:handle")
    connection = served.connect()
    connection.request("POST", "/", b"endless", TEXT)
    assert connection.getresponse().readline() == b"data: one\n"
    connection.close()
    served.until((served.log.parent / "closed").exists)


def test_a_silent_generator_is_given_up_when_the_client_leaves(serve: Serve) -> None:
    """Long before the next heartbeat would tell."""
    served = serve(handler="streaming/handler.py:handle", heartbeat_s=300.0)
    connection = served.connect()
    connection.request("POST", "/", b"silent", TEXT)
    assert connection.getresponse().readline() == b"data: one\n"
    connection.close()
    served.until(lambda: served.metric("medusa_requests_in_flight") == 0)
    (served.log.parent / "go").touch()


def test_a_response_with_an_iterator_is_streamed_as_it_is(serve: Serve) -> None:
    status, data, headers = serve(handler="streaming/handler.py:raw").request("POST", "/", b"")
    assert (status, data, headers["content-type"]) == (200, b"abc", "text/csv")


def test_declared_types_are_validated(serve: Serve) -> None:
    served = serve(handler="typed/handler.py:handle")
    assert served.request("POST", "/", {"item": "tea"})[1] == {"item": "tea", "count": 1, "length": 15}
    status, answer, _ = served.request("POST", "/", {"item": "tea", "count": "many"})
    assert status == 422
    assert [entry["field"] for entry in answer["fields"]] == ["count"]
    assert served.request("POST", "/", b"{")[0] == 400


def test_other_declared_types(serve: Serve) -> None:
    served = serve(handler="typed/handler.py:points")
    assert served.request("POST", "/", [{"x": 1, "y": 2}, {"x": 3, "y": 4}])[1] == {"x": 4, "y": 6}
    assert served.request("POST", "/", [{"x": 1}])[1]["fields"][0]["field"] == "0.y"
    status, answer, _ = served.request("POST", "/", [{}] * 5000)
    assert (status, answer["fields"]) == (422, [])
    assert answer["error"].startswith("the body does not fit in 10,000 places")
    assert serve(handler="typed/handler.py:text").request("POST", "/", "é".encode(), TEXT)[1] == "É".encode()


def test_an_openfaas_handler_runs_unchanged(serve: Serve) -> None:
    status, answer, headers = serve(handler="openfaas/handler.py:handle").request("POST", "/p?q=1", b"in", TEXT)
    assert status == 201
    assert answer == {"method": "POST", "body": "in", "query": "1", "path": "/p"}
    assert headers["x-host"]


@pytest.mark.parametrize("name", ["handle", "old"])
def test_cloud_events_in_both_modes(serve: Serve, name: str) -> None:
    served = serve(handler=f"cloudevent/handler.py:{name}")
    attributes = {"id": "7", "type": "t", "source": "/s", "specversion": "1.0"}
    binary = {f"ce-{key}": value for key, value in attributes.items()}
    structured = {"Content-Type": "application/cloudevents+json"}
    for sent in (
        served.request("POST", "/", {"n": 1}, binary),
        served.request("POST", "/", attributes | {"datacontenttype": "application/json", "data": {"n": 1}}, structured),
    ):
        status, answer, headers = sent
        assert status == 200, answer
        if name == "old":
            assert answer == {"id": "7", "data": {"n": 1}}
        else:
            assert answer == {"got": {"n": 1}}
            assert headers["ce-id"] == "r-7"
    assert served.request("POST", "/", {"n": 1})[0] == 400


@pytest.fixture(scope="module")
def results(serve_module: Serve) -> Any:
    return serve_module(handler="results/handler.py:handle")


@pytest.mark.parametrize(
    ("what", "status", "body", "kind"),
    [
        ("dict", 200, {"a": "Fri, 02 Jan 2026 00:00:00 GMT"}, "application/json"),
        ("list", 200, [1, "two"], "application/json"),
        ("str", 200, "text ä".encode(), "text/plain; charset=utf-8"),
        ("bytes", 200, b"\x00\x01", "application/octet-stream"),
        ("none", 204, b"", None),
        ("tuple", 201, {"made": 1}, "application/json"),
        ("headers", 302, b"moved", "text/plain; charset=utf-8"),
        ("response", 203, b"<p>", "text/html"),
    ],
)
def test_results(results: Any, what: str, status: int, body: Any, kind: str | None) -> None:
    found = results.request("GET", f"/?what={what}")
    assert found[:2] == (status, body)
    assert kind is None or found[2]["content-type"] == kind
    if what == "headers":
        assert found[2]["location"] == "/there"


def test_numbers_that_json_cannot_express_are_named(results: Any) -> None:
    for what, found in (("nan", "NaN in result['scores'][1]['a']"), ("infinity", "-Infinity in result[0]")):
        status, answer, headers = results.request("GET", f"/?what={what}")
        assert (status, answer["error"]) == (500, f"internal error; {LOG} {headers['x-request-id']}")
        assert f"ValueError: the function returned {found}, which JSON cannot express" in results.output()
    first, error, done = events(results.request("GET", "/?what=stream")[1])
    assert (first, done) == ("1.5", "[DONE]")
    assert json.loads(error)["error"].startswith("internal error")
    assert "Infinity in result['loss']" in results.output()


@pytest.mark.parametrize(("name", "timeout_s"), [("handle", 0), ("handle", 60), ("stream", 0), ("Asynchronous", 0)])
def test_a_child_that_user_code_forks_ends_with_the_users_code(serve: Serve, name: str, timeout_s: float) -> None:
    served = serve(handler=f"forking/handler.py:{name}", timeout_s=timeout_s)
    for how, expected in (("exit", 3), ("raise", 1), ("return", 0)):
        status, answer, _ = served.request("POST", "/", how.encode(), TEXT)
        found = answer if name != "stream" else json.loads(events(answer)[0])
        assert (status, found) == (200, {"status": expected})
    assert "ValueError: in the child" in served.output()


def test_a_child_that_loading_forks_ends_the_load_for_itself_alone(serve: Serve) -> None:
    served = serve(handler="forking/handler.py:Loading")
    assert served.request("POST", "/", b"", TEXT)[1] == {"status": 3}
    assert "failed" not in served.output()


def test_every_path_of_a_function_is_described(serve: Serve) -> None:
    paths = serve(handler="function/handler.py:handle").request("GET", "/openapi.json")[1]["paths"]
    assert set(paths["/{path}"]) == {"parameters", "get", "post", "put", "patch", "delete"}


def test_bodies_that_are_not_json_are_described(serve: Serve) -> None:
    served = serve(handler="function/handler.py:handle")
    for number in (b"NaN", b"Infinity", b"-Infinity"):
        status, answer, _ = served.request("POST", "/", b'{"name": [%s]}' % number)
        assert (status, answer["error"]) == (
            400, f"expected a JSON body, found {number.decode()}, which JSON does not have"
        )  # fmt: skip
    assert served.request("POST", "/", b'{"name": "NaN"}')[1]["hello"] == "NaN"
    status, answer, _ = served.request("POST", "/", gzip.compress(b'{"name": "Ada"}'))
    assert (status, "gzip; send it uncompressed" in answer["error"]) == (400, True)
    typed = serve(handler="typed/handler.py:values")
    assert typed.request("POST", "/", b'{"a": NaN}')[0] == 400
    assert typed.request("POST", "/", b'{"Infinity": 1}')[1] == {"Infinity": 1.0}


def test_errors_of_user_code(serve: Serve) -> None:
    served = serve(handler="failing/handler.py:handle")
    status, answer, headers = served.request("POST", "/", b"gone", TEXT)
    assert (status, answer, headers["x-why"]) == (410, {"error": "it is gone"}, "test")
    for path in ("/tokenize", "/classify"):  # its own, where there is no model
        assert served.request("POST", path, b"gone", TEXT)[1] == {"error": "it is gone"}
    status, answer, headers = served.request("POST", "/", b"", TEXT)
    assert status == 500
    assert headers["x-request-id"] in answer["error"]
    assert "secret-value" not in str(answer)
    log = served.output()
    assert "KeyError: 'secret-value'" in log
    assert "deeper" in log
    assert "medusa_handler" not in log, "frames of ours are shown"
    assert served.request("POST", "/", b"unsendable", TEXT)[0] == 500
    assert "expected dict, list, str" in served.output()
    assert "flask" not in served.output(), "frames of the server are shown"


def test_a_response_that_http_cannot_carry_keeps_no_place(serve: Serve) -> None:
    served = serve(handler="unsendable/handler.py:handle", max_concurrency=1, hold_s=5)
    for what in (b"status", b"long status", b"header", b"name", b"length", b"negative"):
        assert served.request("POST", "/", what, TEXT)[0] == 500, what
        assert served.request("POST", "/", b"ok", TEXT)[:2] == (200, b"ok"), what
    assert "ValueError: the function returned the status 99; expected" in served.output()
    assert "ValueError: the function returned the header 'X-A'" in served.output()


def test_an_error_that_http_cannot_carry_is_a_defect_of_the_function(serve: Serve) -> None:
    served = serve(handler="unsendable/handler.py:handle")
    for what in (b"error status", b"error text", b"error header", b"error name"):
        status, answer, headers = served.request("POST", "/", what, TEXT)
        assert status == 500, what
        assert headers["x-request-id"] in answer["error"], what
    assert "ValueError: HttpError: found the status 100; expected a number from 200 to 999" in served.output()
    assert "ValueError: HttpError: found the header 'a b', which HTTP cannot carry" in served.output()


def test_headers_of_a_result_may_repeat(serve: Serve) -> None:
    served = serve(handler="unsendable/handler.py:handle")
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("POST", "/", b"cookies", {"content-type": "text/plain"})
    assert connection.getresponse().headers.get_all("set-cookie") == ["a=1", "b=2"]
    connection.close()


def test_a_response_says_how_long_its_own_body_is(serve: Serve) -> None:
    """A function that passes on another server's headers gives the length of a body that was compressed."""
    served = serve(handler="unsendable/handler.py:handle", max_concurrency=1, hold_s=5)
    for what in (b"too long", b"too short", b"flask", b"right stream"):
        status, answer, headers = served.request("POST", "/", what, TEXT)
        assert (status, answer, headers["content-length"]) == (200, b"all of it", "9"), what
    assert served.request("POST", "/", b"error", TEXT)[:2] == (500, {"error": "all of it"})
    with pytest.raises(http.client.IncompleteRead):  # not the beginning of the next response
        served.request("POST", "/", b"short stream", TEXT)
    assert served.request("POST", "/", b"long stream", TEXT)[1] == b"all"
    assert served.request("POST", "/", b"ok", TEXT)[:2] == (200, b"ok")
    assert "returned a body of 9 bytes with the header Content-Length: 100" in served.output()
    served.until(lambda: "returned a body of 9 bytes with the header Content-Length: 3" in served.output())


def test_sys_exit_ends_its_own_request_alone(serve: Serve) -> None:
    served = serve(handler="exiting/handler.py:handle")
    assert served.request("POST", "/", b"exit", TEXT)[0] == 500
    assert "SystemExit: 3" in served.output()
    late = events(served.request("POST", "/", b"late", TEXT)[1])
    assert late[0] == "one"
    assert "error" in json.loads(late[1])
    with pytest.raises(http.client.IncompleteRead):
        served.request("POST", "/", b"body", TEXT)
    assert served.request("POST", "/", b"ok", TEXT)[:2] == (200, b"ok")


def test_what_ends_a_process_ends_its_own_response_alone(serve: Serve) -> None:
    served = serve(handler="exiting/handler.py:handle")
    with contextlib.closing(served.connect()) as other:
        other.request("GET", "/metrics")
        other.getresponse().read()
        assert served.request("POST", "/", b"first", TEXT)[0] == 500
        for what in (b"stop", b"flask"):
            with pytest.raises(http.client.IncompleteRead):
                served.request("POST", "/", what, TEXT)
        other.request("POST", "/", b"ok", TEXT)  # the worker is still the one that answered before
        assert other.getresponse().read() == b"ok"
    assert "an answer was cut off" in served.output()


def test_sys_exit_does_not_end_the_event_loop(serve: Serve) -> None:
    served = serve(handler="exiting/handler.py:Asynchronous", hold_s=5)
    assert served.request("POST", "/", b"exit", TEXT)[0] == 500
    assert served.request("POST", "/", b"", TEXT)[:2] == (200, b"ok")
    assert served.stop() == 0
    assert "close() of the function failed" in served.output()


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("failing/handler.py:Loading", ("Handler.Failed", "no such index", "in load")),
        ("failing/handler.py:Panicking", ("Handler.Failed", "PanicException: at the disco", "in load")),
        ("failing/handler.py:Nameless", ("Handler.NotFound", "predict", "other")),
        ("failing/handler.py:absent", ("Handler.NotFound", "'absent'", "deeper, handle")),
        ("failing/nowhere.py:handle", ("Handler.NotFound", "nowhere.py")),
        ("typed/handler.py:unknown", ("Handler.NotFound", "'connection'", "complex")),
    ],
)
def test_code_that_cannot_be_loaded(serve: Serve, handler: str, expected: tuple[str, ...]) -> None:
    served = serve(handler=handler)
    served.until(lambda: "failed: " in served.output())
    for text in expected:
        assert text in served.output()
    assert served.request("GET", "/readyz")[0] == 503


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def handle(:", ("SyntaxError", "broken.py")),
        (
            "import not_there_at_all",
            ("ModuleNotFoundError", "not_there_at_all", "broken.py, line 1", "requirements.txt"),
        ),
        ("raise SystemExit(3)", ("SystemExit", "broken.py, line 1")),
        ("def handle(x: Missing): ...", ("Missing",)),
        ("class Own: ...\ndef handle(x: Own): ...", ("cannot fill 'x' of type Own;",)),
    ],
)
def test_code_that_does_not_import(serve: Serve, tmp_path: Any, source: str, expected: tuple[str, ...]) -> None:
    (tmp_path / "broken.py").write_text(source)
    served = serve(handler=f"{tmp_path}/broken.py:handle")
    served.until(lambda: "failed: Handler.NotFound" in served.output())
    for text in expected:
        assert text in served.output()


def test_the_model_behind_a_function(serve: Serve) -> None:
    served = serve(
        handler="model/handler.py:Handler",
        engine=True,
        ready=False,
        files={"chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}"},
    )
    served.control(ready=True)
    assert served.request("POST", "/", {"prompt": "a", "max_tokens": 3})[1] == {"answer": "w0 w1 w2"}
    streamed = served.request("POST", "/", {"prompt": "a", "max_tokens": 2, "stream": True})[1]
    assert events(streamed) == ["w0", " w1", "[DONE]"]
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    assert served.request("POST", "/", chat)[1] == {"answer": "w0 w1"}
    assert served.request("POST", "/", {"prompt": "a " * 200, "max_tokens": 2})[0] == 400
    assert served.request("GET", "/v1/models")[1]["data"][0]["id"] == "words"
    served.control(lose=True)
    status, answer, headers = served.request("POST", "/", {"prompt": "a", "max_tokens": 2})
    assert status == 503
    assert "engine" in answer["error"]
    assert "retry-after" in headers


def test_errors_of_the_models_routes_have_openais_shape_beside_a_function(serve: Serve) -> None:
    served = serve(handler="model/handler.py:Handler", engine=True)
    for path in ("/medusa/describe", "/medusa/generate", "/medusa/call", "/classify", "/v2/rerank", "/tokenize"):
        status, answer, _ = served.request("POST", path, {"model": "another"})
        assert status == 404
        assert answer["error"]["code"] == "model_not_found"
