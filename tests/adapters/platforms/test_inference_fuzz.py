"""Calls of the Open Inference Protocol as no client would send them, and all that a client may send, there and back."""

from __future__ import annotations

import json
import math
import random
import struct
import tracemalloc
from typing import Any

import numpy
import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_adapters.platforms.inference_protocols import InferenceProtocols
from medusa_adapters.platforms.tensor_data import DATATYPES, pack
from medusa_handler.contract import Headers, HttpError, Request, Response
from medusa_handler.http.function_response import to_json

PROTOCOLS = InferenceProtocols(["m"])
LENGTH = "Inference-Header-Content-Length"
SPLIT = b"\0json ends here\0"
SEEDS = [
    b'{"id":"1","inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[[1,2.5],[3,4]]},{"name":"t","shape":[1],'
    b'"datatype":"BYTES","data":["a"]}],"outputs":[{"name":"x","parameters":{"binary_data":true}},{"name":"t"}]}',
    b'{"inputs":[{"name":"x","shape":[2],"datatype":"INT16","parameters":{"binary_data_size":4}},{"name":"t","shape":'
    b'[2],"datatype":"BYTES","parameters":{"binary_data_size":9}}],"parameters":{"binary_data_output":true}}'
    + SPLIT
    + b"\1\0\2\0\1\0\0\0a\0\0\0\0",
    b'{"instances":[[1,2],{"b64":"aGk="},"text",null,true,1e300],"signature_name":"s"}',
]
_WRONG = [
    None,
    True,
    -1,
    0,
    2**64,
    int("9" * 400),
    1e300,
    "",
    "x",
    [],
    {},
    [[]],
    [1, [2]],
    [-1],
    [0],
    [2**40] * 32,
    "\ud800",
]
_BINARY_TYPES = [kind for kind in DATATYPES if kind not in ("BYTES", "BF16")]


def call(data: bytes, path: str = "/v2/models/m/infer") -> Request:
    head, split, binary = data.partition(SPLIT)
    headers = Headers([(LENGTH, str(len(head)))] if split else [])
    return Request(path=path, body=head + binary, headers=headers)


def check(data: bytes) -> None:
    """It is either taken, and its answer is one, or refused by one short line."""
    for path in ("/v2/models/m/infer", "/v1/models/m:predict"):
        try:
            request = PROTOCOLS.receive(call(data, path))
            sent = PROTOCOLS.send(request, request.json)
            text = sent.body[: int(sent.headers[LENGTH])] if isinstance(sent, Response) else to_json(sent)
            assert isinstance(text, str | bytes)
            json.loads(text)
        except (HttpError, ValueError) as error:
            check_refusal(error)


def check_refusal(error: Exception) -> None:
    if not isinstance(error, HttpError):  # what the echo returned is no tensor
        assert "which is no tensor" in str(error)
        return
    assert error.status == 400
    assert len(error.message) < 1500
    assert "\n" not in error.message
    assert "expected" in error.message or "there is no" in error.message


def fuzzed_tensor(chance: random.Random) -> dict[str, Any]:
    """A tensor of which often one field is wrong."""
    kind = chance.choice([*DATATYPES, "FLOAT"])
    tensor = {
        "name": chance.choice("abc"),
        "shape": [chance.randint(0, 3) for _ in range(chance.randint(0, 4))],
        "datatype": kind,
        "data": [_element(kind, chance) for _ in range(chance.randint(0, 8))],
    }
    if chance.random() < 0.5:
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": chance.choice([chance.randint(0, 40), chance.choice(_WRONG)])}
    if chance.random() < 0.5:
        tensor[chance.choice(sorted(tensor))] = chance.choice(_WRONG)
    return tensor


def _element(kind: str, chance: random.Random) -> Any:
    if kind == "BYTES":
        return chance.choice(["", "a", "ä", "\ud800"])
    return chance.random() < 0.5 if kind == "BOOL" else chance.choice([1, 0, -200, 70_000, 0.5, 1e300, math.nan])


def fuzzed_body(chance: random.Random) -> bytes:
    """A call, not always a right one. Made here and not by hypothesis, whose memory grows with all that it draws."""
    body: dict[str, Any] = {"inputs": [fuzzed_tensor(chance) for _ in range(chance.randint(0, 4))]}
    if chance.random() < 0.5:
        flags = [True, False, chance.choice(_WRONG)]
        body["parameters"] = {"binary_data_output": chance.choice(flags)}
        body["outputs"] = [
            {"name": chance.choice("abc"), "parameters": {"binary_data": chance.choice(flags)}}
            for _ in range(chance.randint(0, 3))
        ]
    if chance.random() < 0.1:
        body[chance.choice(["id", "inputs", "outputs", "parameters", "instances"])] = chance.choice(_WRONG)
    binary = SPLIT + chance.randbytes(chance.randint(0, 60)) if chance.random() < 0.5 else b""
    return json.dumps(body).encode() + binary


@pytest.mark.timeout(3600)
def test_whatever_comes_is_taken_or_refused_in_a_line() -> None:
    fuzz(st.integers(0, 2**64).map(lambda seed: fuzzed_body(random.Random(seed))), check, SEEDS)


_LARGE = [b"[" * depth + b"]" * depth for depth in (30, 33, 500, *range(900, 1000, 9), 5000, 100_000)]
_LARGE += [b"[" + b"[]," * 100_000 + b"[]]", b"[" + b"[[[1]]]," * 30_000 + b"[[[1,1]]]]", b"[" + b"9" * 4000 + b"]"]


@pytest.mark.parametrize("shape", ["[1]", str([1] * 32)])
def test_large_bodies_take_memory_for_themselves_alone(shape: str) -> None:
    for lists in _LARGE:
        input_ = b'{"name":"x","shape":%s,"datatype":"FP32","data":%s}' % (shape.encode(), lists)
        check_memory(b'{"inputs":[%s],"instances":%s}' % (input_, lists))
    one = b'{"name":"x","shape":[1000],"datatype":"INT8","parameters":{"binary_data_size":1000}}'
    asked = b'{"name":"x"}' + b',{"name":"x"}' * 2000
    check_memory(b'{"inputs":[%s],"outputs":[%s]}' % (one, asked) + SPLIT + bytes(1000))
    check_memory(b'{"inputs":[%s]}' % (one + (b"," + one) * 2000) + SPLIT + bytes(2_001_000))


def check_memory(data: bytes) -> None:
    tracemalloc.start()
    check(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000 + 200 * len(data)


def test_any_tensors_come_back_as_they_were() -> None:
    chance = random.Random(7)
    for _ in range(300):
        arrays = {f"x{number}": _array(chance) for number in range(chance.randint(0, 5))}
        inputs, binary = [], []
        for name, array in arrays.items():
            kind = "BYTES" if array.dtype == object else _kind(array)
            tensor = {"name": name, "shape": (shape := list(array.shape)), "datatype": kind}
            flat = array.flatten().tolist()
            if chance.random() < 0.5:
                binary.append(
                    pack(kind, flat) if kind == "BYTES" else array.astype(array.dtype.newbyteorder("<")).tobytes()
                )
                tensor["parameters"] = {"binary_data_size": len(binary[-1])}
            else:
                tensor["data"] = array.tolist() if chance.random() < 0.5 and shape else flat
            inputs.append(tensor)
        body = {"inputs": inputs, "parameters": {"binary_data_output": chance.random() < 0.5}}
        request = PROTOCOLS.receive(call(json.dumps(body).encode() + SPLIT + b"".join(binary)))
        got = request.json
        assert got == {name: _empty_is_flat(array) for name, array in arrays.items()}
        sent = PROTOCOLS.send(request, arrays)
        assert {name: each.tolist() for name, each in _received(sent).items()} == {
            name: (array if array.shape else array.reshape(1)).tolist() for name, array in arrays.items()
        }


def _array(chance: random.Random) -> numpy.ndarray[Any, Any]:
    shape = [
        chance.randint(0, 3) if chance.random() < 0.2 else chance.randint(1, 3) for _ in range(chance.randint(0, 3))
    ]
    kind = chance.choice([*_BINARY_TYPES, "BYTES"])
    size = int(numpy.prod(shape))
    if kind == "BYTES":
        texts = numpy.array(["", "ä", "abc", "\0", "\U0001f600"] * size, dtype=object)[:size]
        return texts.reshape(shape)
    raw = numpy.frombuffer(chance.randbytes(8 * size), _dtype(kind))[:size]
    if kind == "BOOL":
        raw = numpy.array([chance.random() < 0.5 for _ in range(size)], bool)
    return numpy.nan_to_num(raw, nan=1.5, posinf=2.0, neginf=-2.0).reshape(shape)


def _dtype(kind: str) -> Any:
    name = kind.lower().replace("fp", "float")
    return numpy.dtype("bool" if kind in ("BOOL",) else name).newbyteorder("<")


def _kind(array: numpy.ndarray[Any, Any]) -> str:
    return next(kind for kind in _BINARY_TYPES if _dtype(kind) == array.dtype)


def _empty_is_flat(array: numpy.ndarray[Any, Any]) -> Any:
    return array.tolist() if array.size else []


def _received(sent: Any) -> dict[str, Any]:
    """Read an answer as Triton's client does."""
    head, binary = sent, b""
    if isinstance(sent, Response):
        length = int(sent.headers[LENGTH])
        assert isinstance(sent.body, bytes)
        head, binary = json.loads(sent.body[:length]), sent.body[length:]
    found = {}
    for each in head["outputs"]:
        if "data" in each:
            array = numpy.array(each["data"], dtype=object)
        else:
            size = each["parameters"]["binary_data_size"]
            data, binary = binary[:size], binary[size:]
            array = (
                numpy.array(_texts(data), dtype=object)
                if each["datatype"] == "BYTES"
                else numpy.frombuffer(data, _dtype(each["datatype"]))
            )
        found[each["name"]] = array.reshape(each["shape"])
    assert not binary
    return found


def _texts(data: bytes) -> list[str]:
    found = []
    while data:
        (length,) = struct.unpack_from("<I", data)
        found.append(data[4 : 4 + length].decode())
        data = data[4 + length :]
    return found
