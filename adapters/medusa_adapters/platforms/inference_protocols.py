"""KServe's V1 protocol and the Open Inference Protocol (github.com/kserve/open-inference-protocol), as calls of POST /.

A call of V1 becomes a request whose body is its instances. One of the Open Inference Protocol has an object of its
inputs as its body, each as nested lists in the tensor's shape.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from medusa_handler.contract import HttpError, Request, Response
from medusa_runtime.errors import json_excerpt

from .negotiation import with_body
from .tensor_data import BINARY_LENGTH, DATATYPES, BinaryData, pack, wrong

_CALL = re.compile("/v1/models/(?P<v1>.+):predict|/v2/models/(?P<v2>.+)/infer")
_MOST_DIMENSIONS = 32
_MOST_NAMED = 10  # outputs in a message
_ONLY_OUTPUT = "output-0"  # the name that KServe's servers give to one
_OF_LISTS = {
    "INT64": DATATYPES["INT64"],
    "FP64": lambda value: isinstance(value, float) or DATATYPES["FP64"](value),  # also one that is not finite
    "BOOL": DATATYPES["BOOL"],
    "BYTES": lambda value: isinstance(value, str | bytes),
}  # the datatypes of plain lists, the first that fits
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
    """A call of the Open Inference Protocol: its id, and the outputs that it asks for, and which in binary form."""

    call_id: str | None = None
    outputs: Mapping[str, bool | None] = field(default_factory=dict)
    binary: bool = False  # for outputs that do not say it themselves


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
        text, data = _parts(request)
        body = replace(request, body=text).object
        inputs = body.get("inputs")
        if not isinstance(inputs, list) or not all(isinstance(tensor, dict) for tensor in inputs):
            raise wrong("inputs", "a list of tensors, each an object", inputs)
        binary = BinaryData(data)
        given = [_input(tensor, f"inputs[{number}]", binary) for number, tensor in enumerate(inputs)]
        binary.check_end()
        if len(values := dict(given)) < len(given):
            raise HttpError(400, "inputs: expected tensors with different names, found one of them twice")
        return _Infer(
            **plain | {"body": json.dumps(values).encode()},
            call_id=_call_id(body),
            outputs=_asked(body),
            binary=bool(_flag(body, "binary_data_output", "parameters")),
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
            return result if result[1] >= 400 else with_body(self.send(request, result[0]), result)
        if isinstance(request, _Infer):
            return self._inferred(request, result)
        return result if isinstance(result, Mapping) and "predictions" in result else {"predictions": result}

    def _inferred(self, request: _Infer, result: Any) -> dict[str, Any] | Response:
        named = _fields(result)
        for name in request.outputs:
            if name not in named:
                known = ", ".join(map(json_excerpt, islice(named, _MOST_NAMED))) or "none"
                more = ", …" if len(named) > _MOST_NAMED else ""
                raise HttpError(400, f"outputs: there is no {json_excerpt(name)}; the function returns {known}{more}")
        asked = request.outputs or dict.fromkeys(named)
        binary: list[bytes] = []
        outputs = [
            _output(name, named[name], binary if (request.binary if own is None else own) else None)
            for name, own in asked.items()
        ]
        identified = {} if request.call_id is None else {"id": request.call_id}
        answer = {"model_name": self._names[0], **identified, "outputs": outputs}
        if not any("parameters" in output for output in outputs):
            return answer
        from medusa_handler.http.function_response import to_json  # imports Flask

        head = to_json(answer).encode()
        length = {BINARY_LENGTH: str(len(head))}
        return Response(head + b"".join(binary), headers=length, content_type="application/octet-stream")

    def _check(self, name: str) -> None:
        if name not in self._names:
            raise HttpError(404, f"there is no model {json_excerpt(name)}; this server has {', '.join(self._names)}")


def _parts(request: Request) -> tuple[bytes, bytes]:
    """Return the JSON of a body, and the tensors in binary form behind it."""
    length = request.headers.get(BINARY_LENGTH, str(len(request.body)))
    if not (length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= len(request.body)):
        size, found = len(request.body), json_excerpt(length)
        raise HttpError(400, f"{BINARY_LENGTH}: expected a length within the body's {size}, found {found}")
    return request.body[: int(length)], request.body[int(length) :]


def _instances(body: Mapping[str, Any]) -> list[Any]:
    """Return the instances of V1's body; ``inputs`` is KServe's other name for them."""
    given = [name for name in ("instances", "inputs") if name in body]
    if len(given) != 1 or not isinstance(found := body[given[0]], list):
        raise HttpError(400, f'expected {{"instances": […]}}, found {json_excerpt(body)}')
    if others := sorted(set(body) - set(given) - {"signature_name"}):  # TensorFlow's, which KServe ignores, too
        raise HttpError(
            400, f"expected {given[0]} alone, which is all that the function gets, found {json_excerpt(others[0])}"
        )
    return found


def _call_id(body: Mapping[str, Any]) -> str | None:
    if isinstance(found := body.get("id"), str | None):
        return found
    raise wrong("id", "text", found)


def _asked(body: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return the names of the outputs that a call asks for, and whether it says that they be in binary form."""
    asked = body.get("outputs") or []
    if not isinstance(asked, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in asked
    ):
        raise wrong("outputs", 'a list of {"name": …}', asked)
    names = {one["name"]: _flag(one, "binary_data", f"outputs[{at}].parameters") for at, one in enumerate(asked)}
    if len(names) < len(asked):
        raise HttpError(400, "outputs: expected different names, found one of them twice")
    return names


def _flag(of: Mapping[str, Any], name: str, place: str) -> bool | None:
    parameters = of.get("parameters")
    found = parameters.get(name) if isinstance(parameters, dict) else None
    if isinstance(found, bool | None):
        return found
    raise wrong(f"{place}.{name}", "true or false", found)


def _input(tensor: Mapping[str, Any], place: str, binary: BinaryData) -> tuple[str, Any]:
    """Return the name of a tensor and its data, nested as its shape says. Its JSON may have it flat or nested."""
    name, shape, kind, data, parameters = (
        tensor.get(field) for field in ("name", "shape", "datatype", "data", "parameters")
    )
    if not isinstance(name, str) or not name:
        raise wrong(f"{place}.name", "text that is not empty", name)
    if not isinstance(shape, list) or not all(DATATYPES["UINT64"](length) for length in shape):
        raise wrong(f"{place}.shape", "a list of whole numbers from 0 to 2^64 - 1", shape)
    if len(shape) > _MOST_DIMENSIONS:
        raise wrong(f"{place}.shape", f"at most {_MOST_DIMENSIONS} dimensions", len(shape))
    if not isinstance(kind, str) or kind not in DATATYPES:
        raise wrong(f"{place}.datatype", f"one of {', '.join(DATATYPES)}", kind)
    count = math.prod(shape)
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        flat = _flat_data(data, shape, count, place)
    elif data is None:
        flat = binary.take(kind, size, count, place)
    else:
        raise wrong(f"{place}.data", "none beside binary_data_size", data)
    for element in flat:
        if not DATATYPES[kind](element):
            raise wrong(f"{place}.data", f"elements of type {kind}", element)
    return name, _nested(flat, shape)


def _flat_data(data: Any, shape: Sequence[int], count: int, place: str) -> list[Any]:
    """Return the elements of a tensor's data, which is flat or nested, in lists of one length."""
    if not isinstance(data, list):
        raise wrong(f"{place}.data", "a list", data)
    given = _shape(data)
    if len(given) > max(len(shape), 1) or not _has_shape(data, given):
        raise wrong(f"{place}.data", f"elements in lists of one length, for the shape {json_excerpt(shape)}", data)
    flat = _flat(data, len(given))
    if count != len(flat):
        message = f"expected {count} elements for the shape {json_excerpt(shape)}, found {len(flat)}"
        raise HttpError(400, f"{place}.data: {message}")
    return flat


def _flat(data: list[Any], depth: int) -> list[Any]:
    """Return the elements of lists in lists, of this depth."""
    for _ in range(depth - 1):
        data = [element for each in data for element in each]
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


def _output(name: str, value: Any, binary: list[bytes] | None) -> dict[str, Any]:
    """Return a value as a tensor: an array with its type, or numbers, truth values or texts, in lists of one length.

    ``binary``, if there is one, gets its data in binary form.
    """
    kind = _OF_ARRAYS.get(str(getattr(value, "dtype", "")).rpartition(".")[2])
    value = _plain(value)
    shape = _shape(value)
    data = _flat([value], len(shape) + 1) if _has_shape(value, shape) else None
    if kind is None and data is not None:
        kind = next((kind for kind, fits in _OF_LISTS.items() if all(map(fits, data))), None)
    if kind is None or data is None:
        raise ValueError(
            f"the function returned {json_excerpt(value)} as {name!r}, which is no tensor; expected numbers, truth "
            "values or texts, in lists of one length"
        )
    tensor = {"name": name, "shape": shape or [1], "datatype": kind}
    if binary is None:
        return tensor | {"data": [each.decode() if isinstance(each, bytes) else each for each in data]}
    binary.append(pack(kind, data))
    return tensor | {"parameters": {"binary_data_size": len(binary[-1])}}


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
