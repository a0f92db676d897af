"""KServe's protocols: V1, the Open Inference Protocol, and OpenAI's routes below /openai."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy
import openai
import pytest
import torch
from medusa_adapters.platforms import kserve
from medusa_adapters.platforms.base import ADAPTERS, resolve
from medusa_adapters.platforms.inference_protocols import InferenceProtocols
from medusa_handler.contract import Request

Launch = Callable[..., Any]
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
SIZE = "inputs[0].parameters.binary_data_size"
INPUT = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2.5, 3, 4]}


@pytest.fixture(scope="module")
def function(launch_module: Launch) -> Any:
    return launch_module(handler="tensors/handler.py", MEDUSA_PLATFORM="kserve", K_SERVICE="iris-predictor")


@pytest.fixture(scope="module")
def model(launch_module: Launch) -> Any:
    return launch_module("--model", str(EXAMPLE), MEDUSA_PLATFORM="kserve", MEDUSA_SERVED_MODEL_NAME="lm")


def predict(function: Any, body: Any, what: str = "echo", name: str = "iris") -> Any:
    return function.request("POST", f"/v1/models/{name}:predict?what={quote(what)}", json.dumps(body).encode())


def infer(function: Any, body: Any, what: str = "echo", **headers: str) -> Any:
    return function.request("POST", f"/v2/models/iris/infer?what={quote(what)}", json.dumps(body).encode(), **headers)


def test_it_is_recognized_and_finds_what_kserve_has_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kserve.variables({"K_SERVICE": "iris-predictor-default"}) == {"MEDUSA_SERVED_MODEL_NAME": "iris"}
    assert kserve.variables({}) == {}
    monkeypatch.setattr(kserve, "MODELS", str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert kserve.variables({}) == {"MEDUSA_MODEL": str(tmp_path)}
    assert ADAPTERS["kserve"].folder == "/mnt/models"
    for folder, name in ((tmp_path, "kserve"), (tmp_path / "none", "knative")):
        monkeypatch.setitem(ADAPTERS, "kserve", ADAPTERS["kserve"]._replace(folder=str(folder)))
        assert resolve("auto", {"K_SERVICE": "iris-predictor"}) == name


def test_instances_are_the_body_and_the_result_is_the_predictions(function: Any) -> None:
    assert predict(function, {"instances": [[1, 2], {"a": None}]}).json == {"predictions": [[1, 2], {"a": None}]}
    assert predict(function, {"inputs": ["text"], "signature_name": "s"}).json == {"predictions": ["text"]}
    assert predict(function, {"instances": []}, '{"predictions": [3], "more": 1}').json == {
        "predictions": [3],
        "more": 1,
    }
    assert predict(function, {"instances": [1, 2]}, "items").json == {"predictions": [1, 2]}
    created = predict(function, {"instances": [1]}, "created")
    assert (created.status, created.json, created.headers["x-path"]) == (201, {"predictions": [1]}, "/")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([1], "expected a JSON object"),
        ({"instance": [1]}, 'expected {"instances": […]}'),
        ({"instances": 1}, 'expected {"instances": […]}'),
        ({"instances": [1], "inputs": [1]}, 'expected {"instances": […]}'),
        (
            {"instances": [1], "parameters": {}},
            'expected instances alone, which is all that the function gets, found "parameters"',
        ),
    ],
)
def test_what_is_no_call_of_v1_is_refused(function: Any, body: Any, said: str) -> None:
    answer = predict(function, body)
    assert answer.status == 400
    assert answer.json["error"].startswith(said)


def test_tensors_go_in_and_out(function: Any) -> None:
    texts = {"name": "t", "shape": [2], "datatype": "BYTES", "data": ["a", "b"], "parameters": {"content_type": "str"}}
    answer = infer(function, {"id": "7", "inputs": [INPUT, texts]})
    outputs = [
        {"name": "x", "shape": [2, 2], "datatype": "FP64", "data": [1, 2.5, 3, 4]},
        {"name": "t", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
    ]
    assert answer.json == {"model_name": "iris", "id": "7", "outputs": outputs}
    only = infer(function, {"inputs": [INPUT, texts], "outputs": [{"name": "t"}]})
    assert only.json == {"model_name": "iris", "outputs": outputs[1:]}
    nested = infer(function, {"inputs": [INPUT | {"data": [[1, 2.5], [3, 4]]}]})
    assert nested.json["outputs"] == outputs[:1]


@pytest.mark.parametrize(
    ("result", "outputs"),
    [
        ("[1, 2]", [{"name": "output-0", "shape": [2], "datatype": "INT64", "data": [1, 2]}]),
        ("[[true], [false]]", [{"name": "output-0", "shape": [2, 1], "datatype": "BOOL", "data": [True, False]}]),
        ("0.5", [{"name": "output-0", "shape": [1], "datatype": "FP64", "data": [0.5]}]),
        ("[[], []]", [{"name": "output-0", "shape": [2, 0], "datatype": "INT64", "data": []}]),
        ("null", []),
    ],
)
def test_results_become_tensors(function: Any, result: str, outputs: list[Any]) -> None:
    assert infer(function, {"inputs": [INPUT]}, result).json["outputs"] == outputs


def test_arrays_keep_their_type() -> None:
    protocols = InferenceProtocols(["m"])
    body = json.dumps({"inputs": [INPUT]}).encode()
    call = protocols.receive(Request(path="/v2/models/m/infer", body=body))
    sent = protocols.send(call, {"a": numpy.ones((1, 2), numpy.float32), "b": [numpy.int8(3)]})
    a = {"name": "a", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 1.0]}
    assert sent["outputs"] == [a, {"name": "b", "shape": [1], "datatype": "INT64", "data": [3]}]


@pytest.mark.parametrize("result", ["[[1], [1, 2]]", '[1, "a"]', '{"a": {"b": 1}}', "[[1], 2]", "[null]"])
def test_a_result_that_is_no_tensor_is_the_functions_mistake(function: Any, result: str) -> None:
    answer = infer(function, {"inputs": [INPUT]}, result)
    assert answer.status == 500
    assert answer.json["error"].startswith("internal error")
    function.until(lambda: "which is no tensor; expected" in function.output())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "inputs: expected a list of tensors"),
        ({"inputs": [1]}, "inputs: expected a list of tensors"),
        ({"inputs": [INPUT, INPUT]}, "inputs: expected tensors with different names"),
        ({"inputs": [INPUT | {"name": ""}]}, "inputs[0].name: expected text"),
        ({"inputs": [INPUT | {"shape": [2, -2]}]}, "inputs[0].shape: expected a list"),
        ({"inputs": [INPUT | {"shape": [1] * 40}]}, "inputs[0].shape: expected at most 32"),
        ({"inputs": [INPUT | {"shape": [3, 2]}]}, "inputs[0].data: expected 6 elements for the shape [3, 2], found 4"),
        ({"inputs": [INPUT | {"datatype": "FLOAT"}]}, "inputs[0].datatype: expected one of BOOL"),
        ({"inputs": [INPUT | {"datatype": "INT8"}]}, "inputs[0].data: expected elements of type INT8, found 2.5"),
        ({"inputs": [INPUT | {"data": [[[1], [2]], [[3], [4]]]}]}, "inputs[0].data: expected elements in lists of one"),
        ({"inputs": [INPUT | {"data": [[1, 2, 3], [4]]}]}, "inputs[0].data: expected elements in lists of one length"),
        ({"inputs": [INPUT | {"shape": [int("9" * 4000)] * 2}]}, "inputs[0].shape: expected a list of whole numbers"),
        ({"inputs": [INPUT | {"shape": [2**60] * 32}]}, "inputs[0].data: expected "),
        ({"inputs": [INPUT | {"datatype": "UINT8", "data": [1, 2, 3, 256]}]}, "inputs[0].data: expected elements of t"),
        (
            {"inputs": [INPUT | {"data": [1, 2, 3, 1e39]}]},
            "inputs[0].data: expected elements of type FP32, found 1e+39",
        ),
        ({"inputs": [INPUT | {"parameters": {"binary_data_size": 0}}]}, "inputs[0].data: expected none beside binary"),
        ({"inputs": [INPUT], "outputs": [{"name": "x"}] * 2}, "outputs: expected different names"),
        ({"inputs": [INPUT], "parameters": {"binary_data_output": 1}}, "parameters.binary_data_output: expected true"),
        ({"inputs": [INPUT | {"data": None}]}, "inputs[0].data: expected a list"),
        ({"inputs": [INPUT], "outputs": ["x"]}, "outputs: expected a list"),
        ({"inputs": [INPUT], "outputs": [{"name": "y"}]}, 'outputs: there is no "y"; the function returns "x"'),
        ({"inputs": [INPUT], "id": 7}, "id: expected text"),
    ],
)
def test_what_is_no_call_of_the_open_inference_protocol_is_refused(function: Any, body: Any, said: str) -> None:
    answer = infer(function, body)
    assert answer.status == 400
    assert answer.json["error"].startswith(said)


def binary(function: Any, inputs: list[dict[str, Any]], *data: bytes, length: str | None = None) -> Any:
    head = json.dumps({"inputs": inputs}).encode()
    sent = {"Inference_Header_Content_Length": str(len(head)) if length is None else length}
    return function.request("POST", "/v2/models/iris/infer", head + b"".join(data), **sent)


def tensor(name: str, shape: list[int], datatype: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}


def test_tensors_in_binary_form(function: Any) -> None:
    numbers, texts = struct.pack("<4f", 1, 2.5, 3, 4), struct.pack("<I2sI0s", 2, "ä".encode(), 0, b"")
    inputs = [tensor("x", [2, 2], "FP32", numbers), INPUT | {"name": "plain"}, tensor("t", [2], "BYTES", texts)]
    outputs = {each["name"]: each["data"] for each in binary(function, inputs, numbers, texts).json["outputs"]}
    assert outputs == {"x": [1, 2.5, 3, 4], "plain": [1, 2.5, 3, 4], "t": ["ä", ""]}
    for kind, form in (("BOOL", "?"), ("UINT8", "B"), ("INT64", "q"), ("FP16", "e")):
        data = struct.pack(f"<2{form}", 1, 0)
        assert binary(function, [tensor("x", [2], kind, data)], data).json["outputs"][0]["data"] == [1, 0]


@pytest.mark.parametrize(
    ("kind", "shape", "data", "length", "said"),
    [
        ("FP32", [1], b"1234", "9999", "Inference-Header-Content-Length: expected a length within"),
        ("FP32", [1], b"1234", "x", "Inference-Header-Content-Length: expected a length within"),
        ("FP32", [2], b"1234", None, f"{SIZE}: expected 2 elements of 4 bytes, found 4"),
        ("FP32", [1], b"123", None, f"{SIZE}: expected 1 elements of 4 bytes, found 3"),
        ("FP32", [1], struct.pack("<f", math.nan), None, "inputs[0].data: expected elements of type FP32, found NaN"),
        ("BYTES", [1], b"\x09\0\0\0a", None, f"{SIZE}: expected texts behind their lengths, found a longer one"),
        ("BYTES", [1], b"\x01\0\0", None, f"{SIZE}: expected texts behind their lengths, found a longer one"),
        ("BYTES", [1], b"\xff\xff\xff\xffa", None, f"{SIZE}: expected texts behind their lengths, found a longer one"),
        ("BYTES", [2], b"\0\0\0\0", None, f"{SIZE}: expected 2 texts for the shape, found 1"),
        ("BYTES", [1], b"\0\0\0\0" * 2, None, f"{SIZE}: expected 1 texts for the shape, found more"),
        ("BYTES", [1], b"\x01\0\0\0\xff", None, f"{SIZE}: expected UTF-8, found other bytes in text 0"),
        ("BYTES", [2**60], b"", None, "expected at most 1048576 elements"),
        ("INT8", [2**20 + 1], b"1" * (2**20 + 1), None, "expected at most 1048576 elements"),
    ],
)
def test_what_is_no_tensor_in_binary_form(
    function: Any, kind: str, shape: list[int], data: bytes, length: str | None, said: str
) -> None:
    answer = binary(function, [tensor("x", shape, kind, data)], data, length=length)
    assert answer.status == 400
    assert answer.json["error"].startswith(said)
    assert binary(function, [tensor("x", [1], "INT8", b"1")], b"1", b"2").status == 400


def outputs(answer: Any) -> dict[str, tuple[str, list[int], Any]]:
    """Datatype, shape and data of each output of an answer, some of which are in binary form."""
    length = int(answer.headers["Inference-Header-Content-Length"])
    assert answer.headers["Content-Type"] == "application/octet-stream"
    found, binary = {}, answer.body[length:]
    for each in json.loads(answer.body[:length])["outputs"]:
        size = each.get("parameters", {}).get("binary_data_size", 0)
        found[each["name"]] = each["datatype"], each["shape"], each.get("data", binary[:size])
        binary = binary[size:]
    assert not binary
    return found


def test_outputs_in_binary_form(function: Any) -> None:
    result = '{"x": [[1, 2], [3, 4]], "t": ["ä", ""], "none": []}'
    call = {"inputs": [], "parameters": {"binary_data_output": True}}
    x = struct.pack("<4q", 1, 2, 3, 4)
    texts = struct.pack("<I2sI", 2, "ä".encode(), 0)
    assert outputs(infer(function, call, result)) == {
        "x": ("INT64", [2, 2], x),
        "t": ("BYTES", [2], texts),
        "none": ("INT64", [0], b""),
    }
    mixed = [{"name": "t", "parameters": {"binary_data": False}}, {"name": "x"}]
    assert outputs(infer(function, call | {"outputs": mixed}, result)) == {
        "t": ("BYTES", [2], ["ä", ""]),
        "x": ("INT64", [2, 2], x),
    }
    one = [{"name": "x", "parameters": {"binary_data": True}}, {"name": "t"}]
    assert outputs(infer(function, {"inputs": [], "outputs": one}, result))["x"] == ("INT64", [2, 2], x)
    created = infer(function, call | {"inputs": [INPUT]}, "created")
    assert (created.status, created.headers["x-path"]) == (201, "/")
    assert outputs(created)["x"][0] == "FP64"
    assert "data" in infer(function, call | {"outputs": mixed[:1]}, result).json["outputs"][0]


@pytest.mark.parametrize("kind", ["bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64"])
def test_arrays_in_binary_form_keep_their_bytes(kind: str) -> None:
    array = numpy.array([[0, 1, 100]]).astype(kind)
    if kind.startswith("float"):
        array[0, 1] = numpy.nan
    assert sent_in_binary_form(array) == array.tobytes()


def test_bfloat16_and_bytes_in_binary_form() -> None:
    halves = torch.tensor([1.0, -2.5, math.inf], dtype=torch.bfloat16)
    data = halves.view(torch.int16).numpy().tobytes()
    assert sent_in_binary_form(halves) == data
    assert sent_in_binary_form(numpy.array([b"\xff", "a"], dtype=object)) == b"\1\0\0\0\xff\1\0\0\0a"
    head = json.dumps({"inputs": [tensor("x", [2], "BF16", data[:4])]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    call = Request(path="/v2/models/m/infer", body=head + data[:4], headers=headers)
    assert InferenceProtocols(["m"]).receive(call).json == {"x": [1.0, -2.5]}


def sent_in_binary_form(array: Any) -> bytes:
    protocols = InferenceProtocols(["m"])
    body = json.dumps({"inputs": [], "parameters": {"binary_data_output": True}}).encode()
    sent = protocols.send(protocols.receive(Request(path="/v2/models/m/infer", body=body)), array)
    return bytes(sent.body[int(sent.headers["Inference-Header-Content-Length"]) :])


def test_errors_are_texts(function: Any) -> None:
    for answer in (
        predict(function, {"instances": [1]}, "raise"),
        infer(function, {"inputs": [INPUT]}, "raise"),
        function.request("POST", "/v2/models/other/infer", {"inputs": [INPUT]}),
        function.request("GET", "/v2/models/other/ready"),
    ):
        assert answer.status in (404, 500)
        assert isinstance(answer.json["error"], str)
        assert "secret" not in answer.json["error"]
    assert predict(function, {"instances": [1]}, name="other").status == 404
    assert function.request("GET", "/v1/models/other").status == 404


def test_what_clients_ask_before_they_call(function: Any, launch: Launch) -> None:
    assert function.request("GET", "/v2/health/live").json["live"] is True
    for path in ("/v2/health/ready", "/v2/models/iris/ready", "/v1/models/iris"):
        answer = function.request("GET", path)
        assert (answer.status, answer.json["ready"]) == (200, True)
    assert answer.json["name"] == "iris"
    assert function.request("GET", "/v1/models").json == {"models": ["iris"]}
    assert {"name", "version", "extensions"} == set(function.request("GET", "/v2").json)
    assert function.request("GET", "/v2/models/iris").json["name"] == "iris"
    loading = launch(handler="slow_load/handler.py:Handler", MEDUSA_PLATFORM="kserve", wait=False)
    for path in ("/v2/health/ready", "/v2/models/model/ready", "/v1/models/model"):
        answer = loading.request("GET", path)
        assert (answer.status, answer.json["ready"]) == (503, False)
    assert loading.request("GET", "/v2/health/live").status == 200


def test_other_paths_and_events_are_the_functions(function: Any) -> None:
    assert function.request("POST", "/anything", {"a": 1}).json == {"a": 1}
    event = {
        "ce_specversion": "1.0",
        "ce_id": "1",
        "ce_type": "t",
        "ce_source": "/s",
        "content_type": "application/json",
    }
    answer = function.request("POST", "/v1/models/iris:predict", b'{"instances": [1]}', **event)
    assert (answer.json, answer.headers["ce-type"]) == ({"predictions": [1]}, "t.reply")


def test_a_models_routes_are_openais_also_where_kserves_servers_have_them(model: Any) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{model.port}/openai/v1", api_key="none")
    assert [each.id for each in client.models.list()] == ["lm"]
    assert client.completions.create(model="lm", prompt="This", max_tokens=2).usage.completion_tokens == 2  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="This")
    assert model.request("GET", "/v1/models/lm").json["object"] == "model"
    assert model.request("GET", "/v2/models/lm/ready").json["ready"] is True
    assert model.request("POST", "/v1/models/lm:predict", {"instances": ["This"]}).status in (404, 405)
    assert model.request("POST", "/v2/models/lm/infer", {"inputs": [INPUT]}).status in (404, 405)


def test_a_function_with_a_model_has_both(launch: Launch) -> None:
    both = launch(
        "--model", str(EXAMPLE), handler="tensors/handler.py", MEDUSA_PLATFORM="kserve", MEDUSA_SERVED_MODEL_NAME="lm"
    )
    assert both.request("POST", "/v1/models/lm:predict", {"instances": [1]}).json == {"predictions": [1]}
    refused = both.request("POST", "/v1/models/lm:predict", {"instances": 1})
    assert (refused.status, type(refused.json["error"])) == (400, str)
    assert both.request("GET", "/v1/models/lm").json["id"] == "lm"
    assert both.request("POST", "/openai/v1/completions", {"prompt": "This", "max_tokens": 1}).status == 200
