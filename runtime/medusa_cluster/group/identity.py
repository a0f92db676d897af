"""The identity of workers, which must agree before they share a model, and the heartbeats that they exchange."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from medusa_runtime import kernels
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.errors import EngineError
from medusa_runtime.models import ModelConfig
from medusa_runtime.region.reader import Region

from .wire.message import Kind, Message, json_message

HEARTBEAT_S = 0.25
# What must be equal in all workers of a group → how an error calls it.
_EQUAL = {
    "model": "one version of the model",
    "dtype": "one type to compute in (--dtype)",
    "device": "one kind of device to compute on (--device)",
    "gpu": "one type of GPU, and triton on all machines or on none",
    "kernels": "CPUs with the same instructions, whose products are equal to the last bit",
    "torch": "one version of torch",
    "vllm": "one version of vLLM",
    "limits": "one length of texts and one size of batches",
    "total": "one number of layers",
    "size": "one size of the group",
}


def identity_of(
    region: Region, config: ModelConfig, dtype: torch.dtype, *, size: int, gpu: Gpu | None = None
) -> dict[str, Any]:
    """Return the identity that a worker sends in its greeting. ``gpu`` is None for a worker that computes on CPUs."""
    if gpu is not None:
        computes = {"device": "cuda", "gpu": gpu.describe()}
    else:
        products = ", ".join(f"{name}: {value}" for name, value in sorted(kernels.describe().items()))
        computes = {"device": "cpu", "kernels": products}
    return {
        **computes,
        "model": model_digest(region.wait_index()),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "total": config.num_layers,
        "size": size,
    }


def disagreement(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Return in words the first difference that keeps two workers from sharing a model, or None."""
    for name, wanted in _EQUAL.items():
        if ours.get(name) != theirs.get(name):
            return f"all workers of a group need {wanted}; found {ours.get(name)!r} and {theirs.get(name)!r}"
    return None


def model_digest(index: WeightIndex) -> str:
    """Return a digest of a model's index. It does not depend on the execution order, or on where the files lie."""
    digest = blake2b(digest_size=16)
    for name in sorted(index.tensors):
        digest.update(repr((name, *index.tensors[name])).encode())
    for shard in index.shards:
        digest.update(repr((shard.name, shard.size_bytes, None if shard.path else shard.version)).encode())
    return digest.hexdigest()


class Heartbeats:
    """Signs of life, sent to other workers by a thread. Each carries the sender's clock, as nodes' clocks differ.

    ``values`` returns what else a heartbeat says.
    """

    def __init__(
        self, group: int, rank: int, send: Callable[[Message], None], values: Callable[[], dict[str, Any]]
    ) -> None:
        self._group, self._rank = group, rank
        self._send, self._values = send, values
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="group-heartbeat", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.is_set():
            values = {"sent": time.monotonic_ns(), **self._values()}
            try:
                self._send(json_message(Kind.HEARTBEAT, self._group, values, rank=self._rank))
            except EngineError:
                pass  # the channel's reader reports a broken connection
            self._ended.wait(HEARTBEAT_S)

    def close(self) -> None:
        self._ended.set()


__all__ = ["Heartbeats", "disagreement", "identity_of", "model_digest"]
