"""SageMaker's hosting contract: ping, invocations, content types, and the model's place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.platforms import sagemaker

Launch = Callable[..., Any]
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
LINES = "application/jsonlines"


@pytest.fixture(scope="module")
def results(launch_module: Launch) -> Any:
    return launch_module(handler="results/handler.py", SAGEMAKER_REGION="eu-west-1")


@pytest.fixture(scope="module")
def streaming(launch_module: Launch) -> Any:
    return launch_module(handler="streaming/handler.py", SAGEMAKER_REGION="eu-west-1")


@pytest.fixture(scope="module")
def model(launch_module: Launch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint where SageMaker lays it, and no other word of it."""
    folder = tmp_path_factory.mktemp("ml") / "model"
    shutil.copytree(EXAMPLE, folder)
    return launch_module(SM_MODEL_DIR=str(folder), SAGEMAKER_REGION="eu-west-1")


def test_the_models_folder_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "handler.py").touch()
    (tmp_path / "config.json").touch()
    meant = sagemaker.variables({"SM_MODEL_DIR": str(tmp_path), "SAGEMAKER_BIND_TO_PORT": "9000"})
    assert meant["MEDUSA_MODEL"] == str(tmp_path)
    assert meant["MEDUSA_HANDLER"] == str(tmp_path / "code" / "handler.py")
    assert meant["PORT"] == "9000"
    assert "MEDUSA_MODEL" not in sagemaker.variables({"SM_MODEL_DIR": str(tmp_path / "nothing")})


@pytest.mark.parametrize(
    ("what", "accept", "status", "kind", "body"),
    [
        ("dict", "", 200, "application/json", b'{"a": "'),
        ("dict", "*/*", 200, "application/json", b'{"a": "'),
        ("dict", "application/json", 200, "application/json", b'{"a": "'),
        ("dict", "image/png, application/json;q=0.5", 200, "application/json", b'{"a": "'),
        ("dict", LINES, 200, LINES, b'{"a": "'),
        ("dict", "application/octet-stream", 200, "application/octet-stream", b'{"a": "'),
        ("list", LINES, 200, LINES, b'1\n"two"\n'),
        ("str", "text/plain", 200, "text/plain; charset=utf-8", "text ä".encode()),
        ("str", "application/json", 200, "application/json", b'"text \\u00e4"'),
        ("str", "application/octet-stream", 200, "application/octet-stream", "text ä".encode()),
        ("bytes", "application/octet-stream", 200, "application/octet-stream", b"\x00\x01"),
        ("bytes", "application/json", 406, "application/json", b'{"error":"expected Accept'),
        ("dict", "text/plain", 406, "application/json", b'{"error":"expected Accept'),
        ("dict", "application/json;q=0", 200, "application/json", b'{"a": "'),
        ("dict", "application/json;q=x", 400, "application/json", b'{"error":"Accept'),
        ("tuple", LINES, 201, LINES, b'{"made": 1}\n'),
        ("response", "text/plain", 203, "text/html", b"<p>"),
    ],
)
def test_an_answer_is_in_an_accepted_type(
    results: Any, what: str, accept: str, status: int, kind: str, body: bytes
) -> None:
    answer = results.request("POST", f"/invocations?what={what}", b"{}", Accept=accept)
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == kind
    assert answer.body.startswith(body)


def test_a_content_type_that_is_none_is_refused(results: Any) -> None:
    assert results.request("POST", "/invocations?what=dict", b"{}", Content_Type="json").status == 415


def test_the_function_sees_the_request_as_everywhere(launch: Launch) -> None:
    plain = launch(handler="function/handler.py", SAGEMAKER_BIND_TO_PORT="0")
    answer = plain.request("POST", "/invocations", {"name": "a"}, X_Amzn_SageMaker_Inference_Id="inference-1")
    assert answer.json == {"hello": "a", "method": "POST", "path": "/", "query": {}}
    assert answer.headers["x-request-id"] == "inference-1"


def test_custom_attributes_go_in_and_out(launch: Launch) -> None:
    echo = launch(handler="attributes/handler.py", SAGEMAKER_REGION="eu-west-1")
    answer = echo.request("POST", "/invocations", b"", X_Amzn_SageMaker_Custom_Attributes="trace=1")
    assert answer.json == {"given": "trace=1"}
    assert answer.headers["x-amzn-sagemaker-custom-attributes"] == "seen:trace=1"


def test_streams_are_parts_or_lines_or_a_list(streaming: Any) -> None:
    events = streaming.request("POST", "/invocations", b"")
    assert events.headers["transfer-encoding"] == "chunked"
    assert events.body == b'data: one\ndata: two\n\ndata: {"three": 3}\n\ndata: [DONE]\n\n'
    assert streaming.request("POST", "/invocations", b"", Accept=LINES).body == b'"one\\ntwo"\n{"three": 3}\n'
    assert streaming.request("POST", "/invocations", b"", Accept="application/json").json == ["one\ntwo", {"three": 3}]


def test_serverless_buffers(launch: Launch) -> None:
    whole = launch(handler="streaming/handler.py", SAGEMAKER_SERVERLESS="true")
    answer = whole.request("POST", "/invocations", b"")
    assert answer.json == ["one\ntwo", {"three": 3}]
    events = whole.request("POST", "/invocations", b"", Accept="text/plain, */*;q=0.1")
    assert "content-length" in events.headers
    assert "transfer-encoding" not in events.headers
    failing = whole.request("POST", "/invocations", b"late")
    assert failing.status == 500  # nothing has been sent yet, so the status can tell
    assert b"secret" not in failing.body


def test_ping_tells_when_it_is_ready(launch: Launch) -> None:
    loading = launch(handler="slow_load/handler.py:Handler", SAGEMAKER_REGION="eu-west-1", wait=False)
    assert loading.request("GET", "/ping").status == 503
    (loading.folder / "go").touch()
    loading.until(lambda: loading.request("GET", "/ping").status == 200)


def test_a_model_alone(model: Any) -> None:
    body = {"prompt": "This function returns", "max_tokens": 4, "temperature": 0}
    text = model.request("POST", "/invocations", body).json["choices"][0]["text"]
    assert text
    plain = model.request("POST", "/invocations", body, Accept="text/plain")
    assert (plain.body.decode(), plain.headers["content-type"]) == (text, "text/plain; charset=utf-8")
    assert model.request("POST", "/invocations", body, Accept=LINES).json == {"text": text}
    assert model.request("POST", "/invocations", body, Accept="image/png").status == 406
    lines = b"".join(json.dumps(body).encode() + b"\n" for _ in range(2))
    both = model.request("POST", "/invocations", lines, Content_Type=LINES, Accept=LINES)
    assert [json.loads(line) for line in both.body.splitlines()] == [{"text": text}] * 2
    for kind in ("text/plain", "application/octet-stream"):
        prompt = model.request("POST", "/invocations", b"This function returns", Content_Type=kind)
        assert prompt.json["choices"][0]["text"]
    stream = model.request("POST", "/invocations", body | {"stream": True}, Accept="application/json")
    assert stream.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"<a/>", "application/xml", 415),
        (b"{broken", "application/json", 400),
        (b'{"prompt": "a"}\n{"prompt": ', LINES, 400),
        (b'{"prompt": "a"}\n{"prompt": "b", "max_tokens": 2}', LINES, 400),
        (b"[1]\n[2]", LINES, 400),
        (b"", LINES, 400),
        (b"", "text/plain", 400),
        (b'{"prompt": "a", "model": "another"}', "application/json", 404),
    ],
)
def test_what_a_model_cannot_take(model: Any, body: bytes, kind: str, status: int) -> None:
    answer = model.request("POST", "/invocations", body, Content_Type=kind)
    assert answer.status == status, answer.body
    assert answer.json["error"]


def test_wrong_methods(model: Any) -> None:
    answer = model.request("GET", "/invocations")
    assert answer.status == 405
    assert "POST" in answer.headers["allow"]
