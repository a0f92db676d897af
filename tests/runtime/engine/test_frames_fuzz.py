"""What comes over the engine's socket, as a hostile other side would send it: frames, or an error that is ours."""

from __future__ import annotations

import json
import logging
import math
import random
import socket
import struct
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_runtime.engine import server
from medusa_runtime.engine.base import Delta, EngineInfo, GenerateRequest, SamplingParams, TokenLogprob
from medusa_runtime.engine.frames import (
    FrameReader,
    answer_from_frame,
    delta_from_frame,
    delta_to_frame,
    info_from_frame,
    pack,
    request_from_frame,
    request_to_frame,
    unpack,
)
from medusa_runtime.errors import EngineError, MedusaError, RequestError

LETTERS = "ab1²\ud800é\x00"
TYPES = ("generate", "cancel", "call", "hello", "ready", "delta", "result", "error", "none")
FIELDS = ("id", "prompt", "params", "add_special_tokens", "method", "arguments", "info", "values", "value", "code")
REQUEST = GenerateRequest("r1", "héllo", SamplingParams(max_tokens=3, stop=("a",), logit_bias={5: 1.0}))
DELTA = Delta("r1", "hé", (1, 2), (TokenLogprob(1, "h", -0.5, ((2, "e", -1.0),)),), "stop", None, 3, 2, None)
INFO = EngineInfo("spelling", "Speller", 256, 64, (0,), 64)
SEEDS = [
    pack(frame)
    for frame in (
        request_to_frame(REQUEST),
        delta_to_frame(DELTA),
        {"type": "hello", "info": INFO._asdict()},
        {"type": "error", "id": "r1", "code": "Engine.Overloaded", "message": "full", "retry_after_s": 1.0},
        {"type": "result", "id": "call-1", "value": [1, 2]},
        {"type": "call", "id": "call-1", "method": "tokenize", "arguments": {"text": "a", "add_special_tokens": True}},
        {"type": "cancel", "id": "r1"},
    )
]


def value(chance: random.Random, depth: int = 3) -> Any:
    """Any JSON. Made here and not by hypothesis, whose memory grows with each nested value that it draws."""
    kind = chance.randrange(7 if depth else 5)
    if kind == 5:
        return [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind == 6:
        return {text(chance): value(chance, depth - 1) for _ in range(chance.randrange(4))}
    number = chance.randint(-5, 300) if chance.random() < 0.9 else chance.getrandbits(80)
    return (None, chance.random() < 0.5, number, chance.choice((0.5, math.inf, math.nan)), text(chance))[kind]


def text(chance: random.Random) -> str:
    return "".join(chance.choices(LETTERS, k=chance.randrange(8)))


def frame_of(seed: int) -> bytes:
    chance = random.Random(seed)
    fields = {field: value(chance) for field in chance.sample(FIELDS, chance.randrange(8))}
    if chance.random() < 0.5:
        fields["id"] = "r1"
    return pack({"type": chance.choice(TYPES), **fields})


FRAMES = st.integers(0, 2**32).map(frame_of)


def read_one(data: bytes) -> dict[str, Any] | None:
    """The first frame of a stream that ends behind ``data``."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data[: 1 << 16])
        ours.shutdown(socket.SHUT_WR)
        return FrameReader(theirs).read()


def check_reading(data: bytes) -> None:
    """As the client reads it: any frame, whatever its type, is a value or an EngineError."""
    try:
        frame = read_one(data)
        if frame is not None:
            for parse in (delta_from_frame, info_from_frame, answer_from_frame):
                try:
                    parse(frame)
                except EngineError:
                    pass
            try:
                request = request_from_frame(frame)
            except RequestError:
                return
            assert isinstance(request.id, str)
    except EngineError:
        pass


class Engine:
    """Takes everything, and answers nothing."""

    info = INFO

    def add(self, request: GenerateRequest, sink: Any) -> None: ...

    def cancel(self, request_id: str) -> None:
        assert isinstance(request_id, str)

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def detokenize(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.mark.timeout(3000)
def test_no_bytes_break_a_reader() -> None:
    fuzz(st.one_of(FRAMES, st.binary(max_size=64)), check_reading, SEEDS)


@pytest.mark.timeout(3000)
def test_no_frame_breaks_the_server() -> None:
    """Each frame that can be read is answered or refused, and the connection goes on."""
    ours, theirs = socket.socketpair()
    connection = server._Connection(theirs, Engine(), server._CallThreads(), lambda _: None)  # type: ignore[arg-type]

    def check(data: bytes) -> None:
        try:
            frame = unpack(data[4:])
        except EngineError:
            return
        if frame["type"] == "call" and frame.get("method") == "embed":
            return  # a thread of its own; this engine has none
        connection._handle(frame)
        while not connection._outgoing.empty():
            answer = connection._outgoing.get()
            assert answer is not None
            assert unpack(pack(answer)[4:])["type"] in ("result", "error")
        connection._running.clear()

    logging.disable(logging.CRITICAL)
    with ours, theirs:
        fuzz(FRAMES, check, SEEDS)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 50_000,
        b"1" * 5000,
        b"\xff",
        b"{}",
        b'{"type": 1}',
        b'{"type": "cancel", "id": ["a"]}',
        b'{"type": "generate", "id": {}}',
    ],
)
def test_what_is_no_frame_is_an_engine_error(body: bytes) -> None:
    with pytest.raises(EngineError):
        read_one(struct.pack("<I", len(body)) + body)


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "generate", "id": "a", "prompt": "a", "params": [1], "add_special_tokens": True},
        {"type": "generate", "id": "a", "prompt": 1, "params": {}, "add_special_tokens": True},
        {"type": "generate", "id": "a", "prompt": "a", "params": {"logit_bias": [1]}, "add_special_tokens": True},
        {"type": "generate", "id": "a", "prompt": "a", "params": {"none": 1}, "add_special_tokens": True},
    ],
)
def test_what_is_no_request_is_a_request_error(frame: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="could not be read"):
        request_from_frame(json.loads(json.dumps(frame)))


@pytest.mark.parametrize(
    ("parse", "frame"),
    [
        (delta_from_frame, {"type": "delta", "id": "a", "values": 1}),
        (delta_from_frame, {"type": "delta", "values": list(DELTA[1:])}),
        (info_from_frame, {"type": "hello", "info": {"engine": "a"}}),
        (info_from_frame, {"type": "hello", "info": []}),
        (answer_from_frame, {"type": "error", "id": "a"}),
        (answer_from_frame, {"type": "error", "id": "a", "code": "Engine.Overloaded", "message": "x"}),
    ],
)
def test_what_is_no_answer_is_an_engine_error(parse: Any, frame: dict[str, Any]) -> None:
    with pytest.raises(MedusaError, match="could not be read"):
        parse(frame)
