"""KServe's V1 protocol and the Open Inference Protocol (github.com/kserve/open-inference-protocol), as calls of POST /.

A call of V1 becomes a request whose body is its instances. One of the Open Inference Protocol has an object of its
inputs as its body, each as nested lists in the tensor's shape.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from medusa_handler.contract import HttpError, Request, Response
from medusa_runtime.errors import json_excerpt

_CALL = re.compile("/v1/models/(?P<v1>.+):predict|/v2/models/(?P<v2>.+)/infer")
_BINARY = "Inference-Header-Content-Length"
_MOST_DIMENSIONS = 32
_ONLY_OUTPUT = "output-0"  # the name that KServe's servers give to one


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_DATATYPES: dict[str, Callable[[object], bool]] = {
    "BOOL": lambda value: isinstance(value, bool),
    **dict.fromkeys((f"{kind}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)), _is_int),
    **dict.fromkeys(("FP16", "BF16", "FP32", "FP64"), _is_number),
    "BYTES": lambda value: isinstance(value, str),
}
_FORMS = {"BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h"} | {
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}  # of the package struct
_MOST_BINARY = 1 << 20  # elements of a request
_OF_LISTS = ("INT64", "FP64", "BOOL", "BYTES")  # the datatypes of plain lists, the first that fits
_OF_ARRAYS = {"bool": "BOOL", "bfloat16": "BF16"} | {  # by the names that NumPy and torch have for them
    f"{ours}{bits}": f"{theirs}{bits}"
    for ours, theirs in (("uint", "UINT"), ("int", "INT"), ("float", "FP"))
    for bits in (8, 16, 32, 64)
}


@dataclass(frozen=True)
class _Predict(Request):
    """A call of V1."""


@dataclass(frozen=True)
class _Infer(Request):
    """A call of the Open Inference Protocol: its id, and the outputs that it asks for."""

    call_id: str | None = None
    outputs: Sequence[str] = ()


class InferenceProtocols:
    """Both protocols, for a function that is called by one of these names; the first is in answers."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def model(self, name: str) -> dict[str, Any]:
        """Return the metadata of a model. Raises HttpError 404."""
        self._check(name)
        return {"name": self._names[0], "platform": "medusa-runtime", "inputs": [], "outputs": []}

    def receive(self, request: Request) -> Request:
        """Return a call as a request of ``POST /``, and any other request as it is. Raises HttpError 400 and 404."""
        call = _CALL.fullmatch(request.path) if request.method == "POST" else None
        if call is None:
            return request
        self._check(call["v1"] or call["v2"])
        plain = {**vars(request), "path": "/"}
        if call["v1"]:
            return _Predict(**plain | {"body": json.dumps(_instances(request.object)).encode()})
        text, binary = _parts(request)
        body = replace(request, body=text).object
        inputs = body.get("inputs")
        if not isinstance(inputs, list) or not all(isinstance(tensor, dict) for tensor in inputs):
            raise _wrong("inputs", "a list of tensors, each an object", inputs)
        _add_binary(inputs, binary)
        given = [_input(tensor, f"inputs[{number}]") for number, tensor in enumerate(inputs)]
        if len(values := dict(given)) < len(given):
            raise HttpError(400, "inputs: expected tensors with different names, found one of them twice")
        return _Infer(
            **plain | {"body": json.dumps(values).encode()}, call_id=_call_id(body), outputs=_output_names(body)
        )

    def send(self, request: Request, result: Any) -> Any:
        """Return the result of a call in its protocol, and that of any other request as it is.

        Raises HttpError 400 for an output that is not there, and ValueError for a result that is no tensor.
        """
        if isinstance(result, Iterator):
            return self.send(request, list(result)) if isinstance(request, _Predict | _Infer) else result
        if isinstance(result, Response) or not isinstance(request, _Predict | _Infer):
            return result
        if isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], int):
            return result if result[1] >= 400 else (self.send(request, result[0]), *result[1:])
        if isinstance(request, _Infer):
            return self._inferred(request, result)
        return result if isinstance(result, Mapping) and "predictions" in result else {"predictions": result}

    def _inferred(self, request: _Infer, result: Any) -> dict[str, Any]:
        named = _fields(result)
        for name in request.outputs:
            if name not in named:
                known = ", ".join(map(json_excerpt, named)) or "none"
                raise HttpError(400, f"outputs: there is no {json_excerpt(name)}; the function returns {known}")
        outputs = [_output(name, named[name]) for name in request.outputs or named]
        identified = {} if request.call_id is None else {"id": request.call_id}
        return {"model_name": self._names[0], **identified, "outputs": outputs}

    def _check(self, name: str) -> None:
        if name not in self._names:
            raise HttpError(404, f"there is no model {json_excerpt(name)}; this server has {', '.join(self._names)}")


def _wrong(field: str, expected: str, found: Any) -> HttpError:
    return HttpError(400, f"{field}: expected {expected}, found {json_excerpt(found)}")


def _parts(request: Request) -> tuple[bytes, memoryview]:
    """Return the JSON of a body, and the tensors in binary form behind it (Triton's binary tensor data extension)."""
    length = request.headers.get(_BINARY, str(len(request.body)))
    if not (length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= len(request.body)):
        raise HttpError(400, f"{_BINARY}: expected a length within the body's {len(request.body)}, found {length[:40]}")
    return request.body[: int(length)], memoryview(request.body)[int(length) :]


def _add_binary(inputs: Sequence[dict[str, Any]], binary: memoryview) -> None:
    """Give tensors in binary form their data. It may have fewer elements than JSON, whose memory is reserved."""
    elements = 0
    for number, tensor in enumerate(inputs):
        parameters = tensor.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if size is None:
            continue
        if not _is_int(size) or not 0 <= size <= len(binary):
            raise _wrong(f"inputs[{number}].parameters.binary_data_size", f"at most {len(binary)}", size)
        tensor["data"] = _elements(tensor.get("datatype"), bytes(binary[:size]), f"inputs[{number}]", elements)
        elements += len(tensor["data"])
        binary = binary[size:]
    if binary:
        raise HttpError(400, f"expected tensors for all of the body, found {len(binary)} bytes behind them")


def _elements(kind: object, data: bytes, place: str, before: int) -> list[Any]:
    """Return the elements of a tensor in binary form, of which there are ``before`` others."""
    form = struct.Struct(f"<{_FORMS[kind]}") if isinstance(kind, str) and kind in _FORMS else None
    if form is None and kind != "BYTES":
        raise _wrong(f"{place}.datatype", f"one of {', '.join(_FORMS)} and BYTES in binary form", kind)
    try:
        elements = (one for (one,) in form.iter_unpack(data)) if form else _texts(data)
        found = list(islice(elements, _MOST_BINARY + 1))
    except (struct.error, UnicodeDecodeError):
        raise HttpError(
            400, f"{place}: expected elements of type {kind} in binary form, found something else"
        ) from None
    if before + len(found) > _MOST_BINARY:
        raise HttpError(400, f"expected at most {_MOST_BINARY} elements in binary form, found more")
    return found


def _texts(data: bytes) -> Iterator[str]:
    """Yield texts, each of which follows its length in four bytes."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        at += 4 + length
        if at > len(data):
            raise struct.error
        yield data[at - length : at].decode()


def _instances(body: Mapping[str, Any]) -> list[Any]:
    """Return the instances of V1's body; ``inputs`` is KServe's other name for them."""
    given = [name for name in ("instances", "inputs") if name in body]
    if len(given) != 1 or not isinstance(found := body[given[0]], list):
        raise HttpError(400, f'expected {{"instances": […]}}, found {json_excerpt(body)}')
    if others := sorted(set(body) - set(given) - {"signature_name"}):  # TensorFlow's, which KServe ignores, too
        raise HttpError(400, f"{others[0]}: expected {given[0]} alone, since the function gets nothing else")
    return found


def _call_id(body: Mapping[str, Any]) -> str | None:
    if isinstance(found := body.get("id"), str | None):
        return found
    raise _wrong("id", "text", found)


def _output_names(body: Mapping[str, Any]) -> list[str]:
    asked = body.get("outputs") or []
    if not isinstance(asked, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in asked
    ):
        raise _wrong("outputs", 'a list of {"name": …}', asked)
    return [one["name"] for one in asked]


def _input(tensor: Mapping[str, Any], place: str) -> tuple[str, Any]:
    """Return the name of a tensor and its data, nested as its shape says. The data may be flat or nested."""
    name, shape, kind, data = (tensor.get(field) for field in ("name", "shape", "datatype", "data"))
    if not isinstance(name, str) or not name:
        raise _wrong(f"{place}.name", "text that is not empty", name)
    if not isinstance(shape, list) or not all(_is_int(length) and length >= 0 for length in shape):
        raise _wrong(f"{place}.shape", "a list of whole numbers of at least 0", shape)
    if len(shape) > _MOST_DIMENSIONS:
        raise _wrong(f"{place}.shape", f"at most {_MOST_DIMENSIONS} dimensions", len(shape))
    if not isinstance(kind, str) or kind not in _DATATYPES:
        raise _wrong(f"{place}.datatype", f"one of {', '.join(_DATATYPES)}", kind)
    if not isinstance(data, list):
        raise _wrong(f"{place}.data", "a list", data)
    flat = _flat(data, len(shape))
    if (count := math.prod(shape)) != len(flat):
        raise HttpError(400, f"{place}.data: expected {count} elements for the shape {shape}, found {len(flat)}")
    for element in flat:
        if not _DATATYPES[kind](element):
            raise _wrong(f"{place}.data", f"elements of type {kind}", element)
    return name, _nested(flat, shape)


def _flat(data: list[Any], depth: int) -> list[Any]:
    """Return the elements of lists in lists, up to this depth; deeper ones stay lists."""
    for _ in range(depth - 1):
        if not any(isinstance(each, list) for each in data):
            break
        data = [element for each in data for element in (each if isinstance(each, list) else [each])]
    return data


def _nested(flat: list[Any], shape: Sequence[int]) -> Any:
    for length in reversed(shape[1:]):
        flat = [flat[start : start + length] for start in range(0, len(flat), length)] if length else flat
    return flat if shape else flat[0]


def _fields(result: Any) -> Mapping[str, Any]:
    """Return a result's outputs by their names."""
    if result is None:
        return {}
    if hasattr(result, "model_dump"):
        result = result.model_dump()
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = dataclasses.asdict(result)
    return result if isinstance(result, Mapping) else {_ONLY_OUTPUT: result}


def _output(name: str, value: Any) -> dict[str, Any]:
    """Return a value as a tensor: an array with its type, or numbers, truth values or texts, in lists of one length."""
    kind = _OF_ARRAYS.get(str(getattr(value, "dtype", "")).rpartition(".")[2])
    value = _plain(value)
    shape = _shape(value)
    data = _flat([value], len(shape) + 1)
    if kind is None:
        kind = next((kind for kind in _OF_LISTS if all(map(_DATATYPES[kind], data))), None)
    if kind is None or not _has_shape(value, shape):
        raise ValueError(
            f"the function returned {json_excerpt(value)} as {name!r}, which is no tensor; expected numbers, truth "
            "values or texts, in lists of one length"
        )
    return {"name": name, "shape": shape or [1], "datatype": kind, "data": data}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _shape(value: Any) -> list[int]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    if not shape:
        return not isinstance(value, list)
    return isinstance(value, list) and len(value) == shape[0] and all(_has_shape(each, shape[1:]) for each in value)


__all__ = ["InferenceProtocols"]
