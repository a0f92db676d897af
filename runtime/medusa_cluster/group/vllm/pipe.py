"""vLLM's pipeline over the connections of a group.

vLLM passes hidden states on through a ``GroupCoordinator``, whose processes belong to one group of torch.distributed.
Such a group cannot lose a process, and any process that reaches its ports can take part. Here each worker is alone in
its torch.distributed group, and the pipeline's coordinator sends and receives over the group's own connections.
"""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from medusa_runtime.errors import EngineError
from torch import Tensor
from vllm.distributed import parallel_state

from ..wire.channel import TcpChannel
from ..wire.message import Kind, Message, buffer_of

_ALIGNED = 64
_POLL_S = 0.2
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Pipe(parallel_state.GroupCoordinator):  # type: ignore[misc]
    """The coordinator of one rank among ``size``. ``check`` raises an error if the pipeline is broken."""

    def __init__(
        self, rank: int, size: int, group: int, incoming: queue.SimpleQueue[Message], check: Callable[[], None]
    ) -> None:
        # vLLM's constructor would make process groups of torch.distributed.
        alone = parallel_state.get_world_group()
        self.rank = self.rank_in_group = rank
        self.ranks = list(range(size))
        self.world_size = size
        self.local_rank = 0
        self.device = torch.device("cpu")
        self.cpu_group, self.device_group = alone.cpu_group, alone.device_group
        self.device_communicator = self.mq_broadcaster = None
        self.unique_name = f"medusa-pipe-{rank}"
        self._incoming = incoming
        self.next_channel: TcpChannel | None = None
        self.formed = threading.Event()  # set once ``next_channel`` is known; the last rank has none
        self._group = group
        self._check = check

    def install(self) -> None:
        """Become vLLM's pipeline group in this process, until ``remove``."""
        self._alone = parallel_state._PP
        parallel_state._PP = self

    def remove(self) -> None:
        """Give the process back its own pipeline group, in which it is alone."""
        if parallel_state._PP is self:
            parallel_state._PP = self._alone

    def isend_tensor_dict(self, tensor_dict: dict[str, Any], *_: Any, **__: Any) -> list[Any]:
        """Send a copy of the hidden states to the next rank."""
        while not self.formed.wait(_POLL_S):
            self._check()
        assert self.next_channel is not None
        self.next_channel.send(tensors_message(self._group, self.rank, tensor_dict))
        return []

    def irecv_tensor_dict(self, *_: Any, **__: Any) -> tuple[dict[str, Tensor], list[Any], list[Any]]:
        """Wait for the hidden states of the previous rank."""
        while True:
            try:
                message = self._incoming.get(timeout=_POLL_S)
            except queue.Empty:
                self._check()
                continue
            return tensors_of(message), [], []


def tensors_message(group: int, rank: int, tensors: dict[str, Tensor]) -> Message:
    """Return a message with named tensors: a line of JSON with names, dtypes and shapes, then their bytes, aligned."""
    head = json.dumps([[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()]).encode()
    body = bytearray(head + b"\n")
    for tensor in tensors.values():
        body += bytes(-len(body) % _ALIGNED)
        body += buffer_of(tensor)
    return Message(Kind.TENSORS, group, rank=rank, body=body)


def tensors_of(message: Message) -> dict[str, Tensor]:
    """Return the tensors in a message of ``tensors_message``. Raises EngineError for anything else."""
    body = message.body
    try:
        at = body.index(b"\n") + 1
        found: dict[str, Tensor] = {}
        for name, dtype, shape in json.loads(bytes(body[: at - 1])):
            at += -at % _ALIGNED
            kind = _DTYPES[dtype]
            found[str(name)] = torch.frombuffer(body, dtype=kind, count=math.prod(shape), offset=at).view(shape)
            at += math.prod(shape) * kind.itemsize
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EngineError(f"expected hidden states from a worker, found something else ({error})") from None
    return found


__all__ = ["Pipe", "tensors_message", "tensors_of"]
