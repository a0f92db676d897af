"""What leader and workers of a group have in common: an engine that loads its own layers first, and then the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from medusa_runtime import kernels
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.config import Settings
from medusa_runtime.engine.torch.engine import TorchEngine
from medusa_runtime.engine.torch.kv_cache import BLOCK_TOKENS
from medusa_runtime.errors import ConfigError, EngineError, MedusaError
from medusa_runtime.load.loader import Loader
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .link import Link
from .message import Kind, packed
from .plan import GroupPlan

logger = logging.getLogger(__name__)

BEAT_S = 0.25
# What must be equal in all workers of a group, and what to say of it.
_EQUAL = {
    "model": "one version of the model",
    "dtype": "one type to compute in (--dtype)",
    "kernels": "CPUs with the same instructions, whose products are equal to the last bit",
    "torch": "one version of torch",
    "total": "one number of layers",
    "size": "one size of the group",
}


class Member(TorchEngine):
    """An engine that holds a range of a model's layers, and with memory for all of them comes to hold all.

    ``on_full`` is called by the engine's thread when it does.
    """

    def __init__(self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan) -> None:
        if settings.layers is None:
            raise ConfigError("--engine group needs --layers (MEDUSA_LAYERS): the layers that this worker holds first")
        self.plan = plan
        self.link = Link(plan.link_bytes_per_s) if plan.link_bytes_per_s else None
        self._rest: Loader | None = None
        self._rest_error: MedusaError | None = None
        self._rest_lock = threading.Lock()
        self._closing = threading.Event()
        self.full = threading.Event()
        super().__init__(region, settings, timeline)
        if plan.full:
            threading.Thread(target=self._load_rest, name="group-rest", daemon=True).start()

    @property
    def loaded(self) -> bool:
        """Whether this worker's own layers are loaded."""
        return self._loader.applied

    def identity(self) -> dict[str, Any]:
        """What the leader compares before it lets a worker take part."""
        return {
            "model": model_digest(self._region.wait_index()),
            "dtype": str(self._dtype).removeprefix("torch."),
            "kernels": ", ".join(f"{name}: {value}" for name, value in sorted(kernels.describe().items())),
            "torch": torch.__version__,
            "total": self.layers.total,
            "size": self.plan.size,
            "layers": [self.layers.start, self.layers.stop],
            "blocks": self._cache.blocks.blocks,
        }

    @property
    def _needs_rest(self) -> bool:
        """Whether this engine cannot work without the layers that are not its own."""
        raise NotImplementedError

    def on_full(self) -> None:
        """All layers are loaded."""

    def load_rest_now(self) -> None:
        """Begin to load the layers that are not this worker's own, if that has not begun."""
        with self._rest_lock:
            if self._rest is None and not self._closing.is_set():
                self._rest = Loader(self._region, self._applier(rest=True), timeline=self._timeline)

    def close(self) -> None:
        self._closing.set()
        super().close()
        with self._rest_lock:
            if self._rest is not None:
                self._rest.close()

    def _cached_layers(self) -> range:
        # The pool takes memory only where it is written, so a worker that may come to hold all layers has it at once.
        return range(self.layers.total) if self.plan.full else super()._cached_layers()

    def _check_loaded(self) -> None:
        if self._rest_error is not None and self._needs_rest:
            raise self._rest_error
        super()._check_loaded()

    def _load_rest(self) -> None:
        """In a thread of its own: load the other layers behind this worker's own."""
        try:
            self._loader.wait()
            self.load_rest_now()
            rest = self._rest
            if rest is None:
                return
            rest.wait()
        except MedusaError as error:
            self._rest_error = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must hear of it
            if not self._closing.is_set():
                self._rest_error = EngineError(f"the other layers could not be loaded: {error}")
        else:
            self._timeline.mark("full")
            self.full.set()
            self._inbox.post(self.on_full)


def disagreement(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """What two workers would have to have in common and do not, in words."""
    for name, wanted in _EQUAL.items():
        if ours.get(name) != theirs.get(name):
            return f"all workers of a group need {wanted}; found {ours.get(name)!r} and {theirs.get(name)!r}"
    return None


def model_digest(index: WeightIndex) -> str:
    """What tells two models apart, whatever their order and wherever their files lie."""
    digest = blake2b(digest_size=16)
    for name in sorted(index.tensors):
        digest.update(repr((name, *index.tensors[name])).encode())
    for shard in index.shards:
        digest.update(repr((shard.name, shard.size_bytes, None if shard.path else shard.version)).encode())
    return digest.hexdigest()


class Beats:
    """Signs of life to peers, from a thread of their own, with what clocks show (the time on each node is its own)."""

    def __init__(
        self, group: int, rank: int, send: Callable[[Any], None], values: Callable[[], dict[str, Any]]
    ) -> None:
        self._group, self._rank = group, rank
        self._send, self._values = send, values
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="group-beat", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.is_set():
            values = {"sent": time.monotonic_ns(), **self._values()}
            try:
                self._send(packed(Kind.BEAT, self._group, values, stage=self._rank))
            except EngineError:
                pass  # the channel's reader notices it, too
            self._ended.wait(BEAT_S)

    def close(self) -> None:
        self._ended.set()


__all__ = ["BEAT_S", "BLOCK_TOKENS", "Beats", "Member", "disagreement", "model_digest"]
