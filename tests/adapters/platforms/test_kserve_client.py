"""A function on KServe, called by NVIDIA's client for the Open Inference Protocol, with tensors in binary form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest


@pytest.fixture(scope="module")
def tritonclient() -> Any:
    return pytest.importorskip("tritonclient.http", reason="NVIDIA's client is not installed")


@pytest.fixture(scope="module")
def client(tritonclient: Any, launch_module: Callable[..., Any]) -> Iterator[Any]:
    function = launch_module(handler="tensors/handler.py", MEDUSA_PLATFORM="kserve", K_SERVICE="iris-predictor")
    with tritonclient.InferenceServerClient(f"127.0.0.1:{function.port}", network_timeout=60.0) as client:
        yield client


def tensor(name: str, array: Any, datatype: str, binary: bool) -> Any:
    from tritonclient import http as tritonclient

    found = tritonclient.InferInput(name, array.shape, datatype)
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def test_it_asks_what_there_is(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("iris")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    assert client.get_model_metadata("iris")["name"] == "iris"


@pytest.mark.parametrize("binary_inputs", [True, False])
@pytest.mark.parametrize("binary_outputs", [True, False, None])
def test_tensors_go_there_and_back(
    tritonclient: Any, client: Any, binary_inputs: bool, binary_outputs: bool | None
) -> None:
    numbers = numpy.array([[1.5, 2], [3, -4]])
    texts = numpy.array(["ä", "", "ab"], dtype=object)
    none = numpy.zeros((0,))
    inputs = [
        tensor("numbers", numbers, "FP64", binary_inputs),
        tensor("texts", texts, "BYTES", binary_inputs),
        tensor("none", none, "FP64", binary_inputs),
    ]
    names = ("numbers", "texts", "none")
    wanted = None  # the client then asks for all outputs in binary form
    if binary_outputs is not None:
        wanted = [tritonclient.InferRequestedOutput(name, binary_data=binary_outputs) for name in names]
    result = client.infer("iris", inputs, outputs=wanted, request_id="7")
    assert result.get_response()["id"] == "7"
    assert ("data" in result.get_output("numbers")) is (binary_outputs is False)
    assert result.as_numpy("numbers").tolist() == numbers.tolist()
    assert [each if isinstance(each, str) else each.decode() for each in result.as_numpy("texts")] == list(texts)
    assert result.as_numpy("none").shape == (0,)


def test_errors_say_what_was_wrong(tritonclient: Any, client: Any) -> None:
    numbers = tensor("x", numpy.ones(2), "FP64", binary=True)
    wanted = [tritonclient.InferRequestedOutput("y")]
    with pytest.raises(Exception, match='there is no "y"; the function returns "x"'):
        client.infer("iris", [numbers], outputs=wanted)
    with pytest.raises(Exception, match='there is no model "other"'):
        client.infer("other", [numbers])
    nan = tensor("x", numpy.array([numpy.nan]), "FP64", binary=True)
    with pytest.raises(Exception, match="expected elements of type FP64, found NaN"):
        client.infer("iris", [nan])
