"""Messages between the workers of a group: a header of fixed size and raw bytes, without pickle.

The body is JSON, except for tensors:

    challenge  the first message of a connection, from the listener, and its proof after the greeting (see handshake)
    greeting   from the other side: a proof, then its rank, its purpose, and the sender's identity
    form       leader → worker: the address of the next worker
    step       leader → every worker: the spans of one step
    hidden     worker → next worker: hidden states [rows, columns] behind its layers (tensor)
    tokens     last worker → leader: the tokens sampled in a step
    heartbeat  both ways: a sign of life, with clocks, and whether the sender's layers are loaded
    fetch      leader → worker: send these blocks of keys and values
    block      worker → leader: one block of all its layers; ``rows`` is the block's number (tensor)
    release    leader → worker: the group is dissolved
    stages     worker → leader: its timeline
    offer      source → target, in live scaling: prompts to prefill
    pull       source → target: hand over the first batch
    handover   target → source: how far a batch is, behind its keys and values (block); hidden states follow
    error      both ways: why the sender gives up
    tensors    worker → next worker, of vLLM: named tensors
    call       leader → worker, of vLLM: a method of its worker, with arguments
    result     worker → leader, of vLLM: the method's result
"""

from __future__ import annotations

import ctypes
import json
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from medusa_runtime.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

_HEADER = struct.Struct("<4sBBHQQBxxxIIQ")
HEADER_BYTES = _HEADER.size
_MAGIC, _VERSION = b"MGRP", 2
LARGEST_BYTES = 256 << 20
LARGEST_GREETING_BYTES = 4 << 10

DTYPES = ("", "float32", "bfloat16", "float16")


class Kind(IntEnum):
    GREETING = 1
    FORM = 2
    CHALLENGE = 3
    STEP = 4
    HIDDEN = 5
    TOKENS = 6
    HEARTBEAT = 7
    FETCH = 8
    BLOCK = 9
    RELEASE = 10
    ERROR = 11
    STAGES = 12
    OFFER = 13
    PULL = 14
    HANDOVER = 15
    TENSORS = 16
    CALL = 17
    RESULT = 18


class Message(NamedTuple):
    """One message. ``rank`` is the sender's rank; ``dtype``, ``rows`` and ``columns`` describe the body's tensor."""

    kind: Kind
    group: int
    step: int = 0
    rank: int = 0
    dtype: int = 0
    rows: int = 0
    columns: int = 0
    body: Any = b""  # any object with the buffer protocol

    def header(self) -> bytes:
        kind, group, step, rank, dtype, rows, columns, body = self
        return _HEADER.pack(_MAGIC, _VERSION, kind, rank, group, step, dtype, rows, columns, memoryview(body).nbytes)

    def values(self) -> dict[str, Any]:
        """Return the JSON object in the body. Raises EngineError if it is none."""
        try:
            found = json.loads(bytes(self.body))
        except (ValueError, RecursionError) as error:
            raise EngineError(f"expected JSON in a group's {self.kind.name.lower()}, found: {error}") from None
        if not isinstance(found, dict):
            raise EngineError(f"expected a JSON object in a group's {self.kind.name.lower()}, found something else")
        return found

    def tensor(self) -> Tensor:
        """Return the tensor [rows, columns] in the body, without a copy. Raises EngineError if the size is wrong."""
        import torch

        dtype = getattr(torch, DTYPES[self.dtype]) if 0 < self.dtype < len(DTYPES) else None
        if dtype is None or self.rows * self.columns * dtype.itemsize != len(self.body) or not self.body:
            raise EngineError(
                f"expected hidden states of {self.rows} x {self.columns} in a group's message, found {len(self.body)} "
                "bytes"
            )
        return torch.frombuffer(self.body, dtype=dtype).view(self.rows, self.columns)


class Head(NamedTuple):
    """The header of a message whose body has not been read yet."""

    message: Message
    body_bytes: int


def parse_header(data: bytes | bytearray, most_bytes: int = LARGEST_BYTES) -> Head:
    """Read a header. Raises EngineError if it is none, or announces a body of more than ``most_bytes``."""
    magic, version, kind, rank, group, step, dtype, rows, columns, body_bytes = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise EngineError("expected a message of a group of workers, found something else")
    if version != _VERSION:
        raise EngineError(
            f"expected version {_VERSION} of a group's messages, found {version}; all workers need one release"
        )
    if kind not in list(Kind):
        raise EngineError(f"expected a known kind of message from a worker, found {kind}")
    if body_bytes > most_bytes:
        raise EngineError(f"expected at most {most_bytes} bytes in a group's message, found {body_bytes}")
    return Head(Message(Kind(kind), group, step, rank, dtype, rows, columns), body_bytes)


def json_message(kind: Kind, group: int, values: dict[str, Any], *, step: int = 0, rank: int = 0) -> Message:
    """Return a message whose body is JSON."""
    return Message(kind, group, step, rank, body=json.dumps(values, separators=(",", ":")).encode())


def hidden_states(group: int, step: int, rank: int, hidden: Tensor) -> Message:
    """Return a message with hidden states [rows, columns]."""
    rows, columns = hidden.shape
    dtype = DTYPES.index(str(hidden.dtype).removeprefix("torch."))
    return Message(Kind.HIDDEN, group, step, rank, dtype, rows, columns, buffer_of(hidden))


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, without a copy if it is contiguous. The view keeps the tensor alive."""
    assert tensor.is_cpu
    tensor = tensor.contiguous()
    array = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


__all__ = [
    "DTYPES",
    "HEADER_BYTES",
    "LARGEST_GREETING_BYTES",
    "Head",
    "Kind",
    "Message",
    "buffer_of",
    "hidden_states",
    "json_message",
    "parse_header",
]
