"""The frames on the socket between function process and engine process: a length, then a JSON object.

They do not use pickle, because the other side may belong to another user (pre-warmed engines). The types of frames:

    client → engine   generate {id, prompt, params, add_special_tokens, adapter, cache_salt},
                      cancel {id} (a generate or a call), call {id, method, arguments},
                      adapter {name} +[region, and the files of local shards]
    engine → client   hello {info}, ready, delta {…}, result {id, value},
                      error {id, code, message, param, retry_after_s}

A client that wants the engine's own HTTP server sends ``http {}`` as the only frame of a connection. The engine answers
``http {}`` once that server is up, and from then on the connection speaks HTTP/1.1.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import Any

from ..bounded_json import MOST_VALUES, count_values, parse_json
from ..errors import EngineError, OverloadedError, RequestError, from_code
from ..process import receive_descriptors
from .base import (
    Delta,
    EngineInfo,
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    StructuredOutputs,
    TokenLogprob,
)

Frame = dict[str, Any]

_LENGTH = struct.Struct("<I")
_LARGEST_BYTES = 64 << 20
_MOST_FRAMES = 16  # how many frames with descriptors may wait to be handled
# The errors of code that reads a field of a frame which the other side has left out, or filled with something else.
UNREADABLE = (AttributeError, KeyError, OverflowError, TypeError, ValueError)


def pack(frame: Frame) -> bytes:
    """Encode a frame, with its length in front. Raises RequestError if it is too large for the other side."""
    body = json.dumps(frame, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    if len(body) > _LARGEST_BYTES:
        raise RequestError(
            f"expected a text whose request and answer take at most {_LARGEST_BYTES} bytes each, found {len(body)}"
        )
    if len(body) > MOST_VALUES and count_values(body, exact_above=MOST_VALUES) > MOST_VALUES:
        raise RequestError(f"expected at most {MOST_VALUES:,} values in a request, found more")
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Frame:
    """Decode a frame from ``body``, the bytes after the length. Raises EngineError if they are not a frame."""
    try:
        frame = parse_json(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise EngineError(f"expected a JSON object over the engine socket, found something else: {error}") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise EngineError("expected a frame with a type over the engine socket, found one without")
    if not isinstance(frame.get("id", ""), str):
        raise EngineError("expected text as the id of a frame over the engine socket, found something else")
    return frame


class FrameReader:
    """Reads whole frames from a stream socket."""

    def __init__(self, connection: socket.socket, *, most_descriptors: int = 0) -> None:
        """Accept up to ``most_descriptors`` descriptors with a frame (SCM_RIGHTS). With 0 the kernel closes them."""
        self._connection = connection
        self._buffer = bytearray()
        self._most = most_descriptors
        self._descriptors: deque[list[int]] = deque()  # a list for each frame that has not been handled yet

    @property
    def has_partial_frame(self) -> bool:
        """Whether a part of the next frame has been received already."""
        return bool(self._buffer)

    def read(self) -> Frame | None:
        """Return the next frame; None when the other side has closed. Raises EngineError for anything else."""
        head = self._take(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > _LARGEST_BYTES:
            raise EngineError(
                f"a frame of {length} bytes came over the engine socket; at most {_LARGEST_BYTES} are sent"
            )
        body = self._take(length)
        if body is None:
            return None
        return unpack(body)

    def descriptors(self) -> list[int]:
        """Return the descriptors that came with the frame read last. The caller closes them."""
        return self._descriptors.popleft() if self._descriptors else []

    def close(self) -> None:
        """Close the descriptors that ``descriptors`` has not returned."""
        while self._descriptors:
            close_all(self._descriptors.popleft())

    def _receive(self) -> bytes:
        if not self._most:
            return self._connection.recv(1 << 18)
        piece, found, flags = receive_descriptors(self._connection, 1 << 18, self._most)
        if found:
            self._descriptors.append(found)
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > _MOST_FRAMES:
            raise EngineError(f"expected at most {self._most} descriptors with a frame, found more")
        return piece

    def _take(self, count: int) -> bytes | None:
        while len(self._buffer) < count:
            try:
                piece = self._receive()
            except ConnectionError:
                return None
            if not piece:
                return None
            self._buffer += piece
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def request_to_frame(request: GenerateRequest) -> Frame:
    """Make a generate frame. It holds only the parameters that differ from their defaults."""
    defaults = SamplingParams()
    params = {
        name: value
        for name in SamplingParams.__slots__
        if (value := getattr(request.params, name)) != getattr(defaults, name)
    }
    frame = {
        "type": "generate",
        "id": request.id,
        "prompt": request.prompt,
        "params": params,
        "add_special_tokens": request.add_special_tokens,
    }
    return frame | {name: value for name in ("adapter", "cache_salt") if (value := getattr(request, name)) is not None}


def request_from_frame(frame: Frame) -> GenerateRequest:
    """Read a request from a generate frame. Raises RequestError if there is none.

    The values of the parameters are not checked here; the engine does that.
    """
    try:
        params = dict(frame["params"])
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if params.get(name) is not None:
                params[name] = tuple(params[name])
        if params.get("logit_bias"):
            params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
        if params.get("structured_outputs") is not None:
            params["structured_outputs"] = StructuredOutputs(*params["structured_outputs"])
        prompt, adapter, cache_salt = frame["prompt"], frame.get("adapter"), frame.get("cache_salt")
        if not isinstance(adapter, str | None) or not isinstance(cache_salt, str | None):
            raise TypeError("adapter and cache_salt: expected texts")
        return GenerateRequest(
            id=frame["id"],
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            params=SamplingParams(**params),
            add_special_tokens=frame["add_special_tokens"],
            adapter=adapter,
            cache_salt=cache_salt,
        )
    except UNREADABLE as error:
        raise RequestError(f"a generate frame could not be read: {error}") from None


def delta_to_frame(delta: Delta) -> Frame:
    frame = {"type": "delta", "id": delta.request_id, "values": delta[1:-1]}
    if delta.prompt_logprobs is not None:
        frame["prompt_logprobs"] = _packed(delta.prompt_logprobs)
    return frame


def _packed(found: PromptLogprobs) -> list[Any]:
    """Encode a prompt's log-probabilities: arrays as base64, since a long prompt has a million values."""
    arrays = [base64.b64encode(values).decode() for values in (found.token_ids, found.logprobs, found.ranks)]
    return [found.first, found.width, *arrays, found.texts, found.texts_here]


def _unpacked(values: list[Any]) -> PromptLogprobs:
    from array import array  # no start waits for it

    (first, text), width, *encoded, texts, texts_here = values
    first_data, second_data, third_data = map(base64.b64decode, encoded)
    token_ids, logprobs, ranks = array("i", first_data), array("f", second_data), array("i", third_data)
    width = int(width)
    if width < 1 or not len(token_ids) == len(logprobs) == width * len(ranks):
        raise ValueError("a prompt's log-probabilities are incomplete")
    tables = ({int(number): str(text) for number, text in table.items()} for table in (texts, texts_here))
    return PromptLogprobs((int(first), str(text)), width, token_ids, logprobs, ranks, *tables)


def delta_from_frame(frame: Frame) -> Delta:
    """Read the delta in a frame. Raises EngineError if there is none."""
    try:
        return _delta(frame)
    except UNREADABLE as error:
        raise EngineError(f"a delta frame could not be read: {error}") from None


def info_from_frame(frame: Frame) -> EngineInfo:
    """Read the engine's info from a hello frame. Raises EngineError if there is none."""
    try:
        return EngineInfo(**{**frame["info"], "eos_token_ids": tuple(frame["info"]["eos_token_ids"])})
    except UNREADABLE as error:
        raise EngineError(f"a hello frame could not be read: {error}") from None


def answer_from_frame(frame: Frame) -> Any:
    """Return the value of a result frame, or the error in an error frame. Raises EngineError for a malformed one."""
    try:
        if frame["type"] == "result":
            return frame["value"]
        error = from_code(frame["code"], str(frame["message"]))
        if isinstance(error, OverloadedError):
            error.retry_after_s = float(frame["retry_after_s"])
        if isinstance(error, RequestError) and isinstance(frame.get("param"), str):
            error.param = frame["param"]
        return error
    except UNREADABLE as error:
        raise EngineError(f"a {frame['type']} frame could not be read: {error}") from None


def _delta(frame: Frame) -> Delta:
    text, token_ids, logprobs, finish_reason, stop_reason, prompt_tokens, completion_tokens, error, cached_tokens = (
        frame["values"]
    )
    parsed = tuple(
        TokenLogprob(token, token_text, logprob, tuple((i, t, p) for i, t, p in top))
        for token, token_text, logprob, top in logprobs
    )
    return Delta(
        frame["id"],
        text,
        tuple(token_ids),
        parsed,
        finish_reason,
        stop_reason,
        prompt_tokens,
        completion_tokens,
        (error[0], error[1]) if error else None,
        cached_tokens,
        _unpacked(frame["prompt_logprobs"]) if "prompt_logprobs" in frame else None,
    )
