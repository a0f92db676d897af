"""The KV plan: the size of the KV cache (MEDUSA §6), recorded once, and checked against the machine at each start.

The memory that a forward needs beside weights and cache is measured offline (``engine/forward_memory.py``). Without a
record, it is computed from the number of layers and the shapes of what they compute (ParaServe §7). No start runs a
forward to find out.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ..checkpoint.index import WeightIndex
from ..config import Settings
from ..errors import ConfigError, StateError
from ..region.reader import Region
from .kinds import KV_PLAN, file_name

logger = logging.getLogger(__name__)

_MARGIN_BYTES = 256 << 20  # for the allocator's slack, bodies, and the other processes of the instance
_MARGIN_SHARE = 2  # where memory is short, the margin is one in this many of the free bytes, but not below the least
_FORMAT = 1
_MOST = 1 << 62  # the largest number in a plan
_PLENTY_BYTES = 1 << 60
_ALIVE = 3  # how many of the widest intermediate results a layer holds at the same time (gate, up, their product)
_HIDDEN_ALIVE = 6  # the same for those as wide as the hidden state (residual, normed, q, k, v, attention's output)
_GRAPH_BYTES = 12 << 20  # a graph's share of the pool, and its executable; vLLM logs 0.5 GiB for 67 of an 8B model
_WORKSPACE_BYTES = 192 << 20  # workspaces of products on the capturing stream, and the images of restored kernels


@dataclass(frozen=True, slots=True)
class KvPlan:
    """A KV cache of ``blocks`` blocks. A block has ``block_tokens`` tokens, and ``block_bytes`` over all layers.

    ``layout`` has the axes of the pool and their lengths, with 0 for the number of blocks. ``activation_bytes`` is the
    most that one forward of ``max_batched_tokens`` takes. ``graph_bytes`` is what CUDA graphs take on a GPU (their
    pool, workspaces, static inputs, executables and kernel images). ``margin_bytes`` stay free besides.

    ``source`` is "recorded", "computed" (there was no record) or "recomputed" (the record does not fit here now).
    """

    block_tokens: int
    block_bytes: int
    blocks: int
    max_model_len: int
    activation_bytes: int
    layout: tuple[tuple[str, int], ...] = ()
    dtype: str = ""
    graph_bytes: int = 0
    margin_bytes: int = _MARGIN_BYTES
    source: str = "computed"

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def cache_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def needed_bytes(self) -> int:
        """The bytes that must be free once the weights are there."""
        return self.cache_bytes + self.overhead_bytes

    @property
    def overhead_bytes(self) -> int:
        """The bytes that must be free beside weights and cache."""
        return self.activation_bytes + self.graph_bytes + self.margin_bytes

    def to_bytes(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> KvPlan:
        """Parse a plan. Raises StateError for anything else, and for impossible numbers."""
        try:
            document = json.loads(data)
            found = document.pop("format")
            document["layout"] = tuple((str(name), int(length)) for name, length in document["layout"])
            plan = cls(**document)
        except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(f"expected a KV plan, found something else ({error}); materialize it again") from None
        counts = (plan.block_tokens, plan.block_bytes, plan.blocks, plan.max_model_len)
        sizes = (plan.activation_bytes, plan.graph_bytes, plan.margin_bytes)
        whole = all(type(number) is int and number < _MOST for number in (*counts, *sizes))
        if found != _FORMAT or not whole or min(counts) <= 0 or min(sizes) < 0 or type(plan.dtype) is not str:
            raise StateError(f"expected a KV plan of format {_FORMAT} with sizes above 0; materialize it again")
        return replace(plan, margin_bytes=_MARGIN_BYTES)  # each start decides about it, not a bundle


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of one engine's cache, as in KvPlan. ``max_positions`` is the longest sequence of the model."""

    block_tokens: int
    block_bytes: int
    layout: tuple[tuple[str, int], ...]
    dtype: str
    max_positions: int


class Least(NamedTuple):
    """The least that a start needs, where memory is short.

    ``margin_bytes`` stay free. ``logits_bytes`` is the part of a forward's need that does not grow with its tokens. The
    rest does, and a forward has at most as many tokens as the cache.
    """

    margin_bytes: int
    logits_bytes: int


def plan_kv_cache(
    geometry: Geometry,
    settings: Settings,
    *,
    free_bytes: int,
    activation_bytes: int,
    graph_bytes: int = 0,
    recorded: KvPlan | None = None,
    least: Least | None = None,
    remedy: str = "give the container more memory",
) -> KvPlan:
    """Plan a cache for ``max_concurrency`` sequences of full length, or for as many tokens as there is room for.

    ``free_bytes`` can be allocated once the weights are there. ``activation_bytes`` is the computed need of a forward,
    and ``graph_bytes`` that of CUDA graphs. A recorded plan for this geometry is used if it fits into free memory. If
    not, its measured sizes are still used. ``least`` says how little is enough where memory is short; without it, as
    much stays free as elsewhere. Raises ConfigError if not even one sequence of the requested length fits; the
    ``remedy`` for too little memory is in its message.
    """
    wanted_len = settings.max_model_len or geometry.max_positions
    if wanted_len > geometry.max_positions:
        raise ConfigError(
            f"--max-model-len={wanted_len} cannot be used: expected at most {geometry.max_positions}, the positions "
            "this model has"
        )
    if recorded is not None and not _is_for(recorded, geometry):
        logger.warning("the recorded KV plan is for another cache layout; computing one")
        recorded = None
    wanted = -(-wanted_len // geometry.block_tokens) * settings.max_concurrency
    planned = KvPlan(
        geometry.block_tokens,
        geometry.block_bytes,
        wanted,
        wanted_len,
        activation_bytes if recorded is None else recorded.activation_bytes,
        geometry.layout,
        geometry.dtype,
        # The record may have been made with fewer graphs than this start has.
        graph_bytes if recorded is None else max(graph_bytes, recorded.graph_bytes),
        _MARGIN_BYTES if least is None else min(max(free_bytes // _MARGIN_SHARE, least.margin_bytes), _MARGIN_BYTES),
    )
    if settings.kv_cache_mb is not None:
        blocks = min(wanted, (settings.kv_cache_mb << 20) // planned.block_bytes)
        return _checked(replace(planned, blocks=blocks), settings, "raise --kv-cache-mb")
    source = "computed"
    if recorded is not None and (recorded.blocks, recorded.max_model_len) == (wanted, wanted_len):
        recorded = replace(recorded, margin_bytes=planned.margin_bytes, source="recorded")
        if recorded.needed_bytes <= free_bytes:
            return recorded
        source = "recomputed"
        logger.info(
            "the KV cache gets what is free here now, %d MiB: the plan, for %d requests of %d tokens, needs %d MiB",
            max(free_bytes, 0) >> 20,
            settings.max_concurrency,
            wanted_len,
            recorded.needed_bytes >> 20,
        )
    step_tokens = settings.max_batched_tokens
    fitting = _fitting(planned, free_bytes, step_tokens, least)
    if fitting.tokens < _least_tokens(fitting, settings):  # a start must not fail because of a record
        planned = replace(
            planned,
            activation_bytes=min(activation_bytes, planned.activation_bytes),
            graph_bytes=min(graph_bytes, planned.graph_bytes),
        )
        fitting = _fitting(planned, free_bytes, step_tokens, least)
    smallest = _with_blocks(planned, -(-_least_tokens(planned, settings) // planned.block_tokens), step_tokens, least)
    return _checked(replace(fitting, source=source), settings, remedy, smallest, free_bytes)


def plan_to_record(geometry: Geometry, settings: Settings, *, activation_bytes: int, graph_bytes: int = 0) -> KvPlan:
    """Plan a cache offline, to be recorded in a bundle.

    The memory that is free here says nothing about later starts, so the plan assumes plenty; each start checks.
    """
    return plan_kv_cache(
        geometry,
        replace(settings, kv_cache_mb=None),
        free_bytes=_PLENTY_BYTES,
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
    )


def recorded_plan(region: Region) -> KvPlan | None:
    """Return the state bundle's plan for this start; None without one, or if it cannot be read, which is logged."""
    data = region.file(file_name(KV_PLAN.name))
    if data is None:
        return None
    try:
        return KvPlan.from_bytes(data)
    except StateError as error:
        logger.warning("the recorded KV plan is not used: %s", error)
        return None


def _fitting(planned: KvPlan, free_bytes: int, step_tokens: int, least: Least | None) -> KvPlan:
    """Return the plan with as many blocks as fit into free memory, at most those that are planned."""

    def needed(blocks: int) -> int:
        return _with_blocks(planned, blocks, step_tokens, least).needed_bytes

    count = bisect_right(range(planned.blocks + 1), free_bytes, key=needed)
    return _with_blocks(planned, max(count - 1, 0), step_tokens, least)


def _with_blocks(planned: KvPlan, blocks: int, step_tokens: int, least: Least | None) -> KvPlan:
    """Return the plan with another number of blocks, and what a forward takes then. A step has ``step_tokens``."""
    activation_bytes = planned.activation_bytes
    if least is not None:
        growing_bytes = max(activation_bytes - least.logits_bytes, 0)
        activation_bytes -= growing_bytes * max(step_tokens - blocks * planned.block_tokens, 0) // step_tokens
    return replace(planned, blocks=blocks, activation_bytes=activation_bytes)


def _is_for(recorded: KvPlan, geometry: Geometry) -> bool:
    theirs = (recorded.block_tokens, recorded.block_bytes, recorded.layout, recorded.dtype)
    return theirs == (geometry.block_tokens, geometry.block_bytes, geometry.layout, geometry.dtype)


def _least_tokens(planned: KvPlan, settings: Settings) -> int:
    """Return the fewest tokens that a cache may have: one sequence of the requested length, or else a block."""
    return planned.max_model_len if settings.max_model_len else min(planned.max_model_len, planned.block_tokens)


def _checked(
    planned: KvPlan, settings: Settings, remedy: str, smallest: KvPlan | None = None, free_bytes: int = 0
) -> KvPlan:
    """Return the plan with a max_model_len that the cache allows. Raises ConfigError if that is too little.

    ``smallest`` is the smallest plan that would do, and ``free_bytes`` what it has to fit in; without it, the size was
    given.
    """
    least = _least_tokens(planned, settings)
    if planned.tokens < least:
        sequence = -(-least // planned.block_tokens) * planned.block_bytes
        found = f"the KV cache has room for {planned.tokens} tokens, but one sequence needs {least} ({_mib(sequence)})"
        if smallest is not None:
            found += (
                f": expected {_mib(smallest.needed_bytes)} of free memory beside the weights "
                f"({_mib(smallest.overhead_bytes)} of it for all else), found {max(free_bytes, 0) >> 20} MiB"
            )
        shorter = "lower --max-model-len, or " if settings.max_model_len else ""
        raise ConfigError(f"{found}; {shorter}{remedy}")
    if planned.tokens < planned.max_model_len:
        logger.warning(
            "the KV cache has room for %d tokens, so max_model_len is %d, not %d",
            planned.tokens,
            planned.tokens,
            planned.max_model_len,
        )
    return replace(planned, max_model_len=min(planned.max_model_len, planned.tokens))


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes >> 20)} MiB"


def activation_bytes(index: WeightIndex, *, hidden: int, vocabulary: int, item_bytes: int, settings: Settings) -> int:
    """Estimate how many bytes a forward of ``max_batched_tokens`` tokens takes at once, from the weights' shapes."""
    token = token_bytes(index, hidden=hidden, vocabulary=vocabulary, item_bytes=item_bytes)
    return settings.max_batched_tokens * token + logits_bytes(settings, vocabulary)


def token_bytes(index: WeightIndex, *, hidden: int, vocabulary: int, item_bytes: int) -> int:
    """Estimate how many bytes each token of a forward takes at once, from the weights' shapes.

    A layer's result is as wide as its weight has rows. The estimate is generous: an engine that runs layer by layer
    frees most of it earlier.
    """
    widths: Sequence[int] = [
        entry.shape[0] for entry in index.tensors.values() if len(entry.shape) == 2 and entry.shape[0] != vocabulary
    ]
    return (_ALIVE * max(widths, default=4 * hidden) + _HIDDEN_ALIVE * hidden) * item_bytes


def logits_bytes(settings: Settings, vocabulary: int) -> int:
    """Return how many bytes the logits of the largest batch take: in float32, and twice, as sampling sorts a copy."""
    return 2 * min(settings.max_concurrency, settings.max_batched_tokens) * vocabulary * 4


def graph_bytes(graphs: int, *, rows: int, blocks: int, vocabulary: int, item_bytes: int) -> int:
    """Estimate how many bytes CUDA graphs take on a GPU for which no bundle was materialized.

    ``rows`` is the number of rows of the largest graph, and ``blocks`` the most that a sequence can have. The static
    inputs and outputs are exact: four numbers and a block table for each row, and a row of logits.
    """
    if not graphs:
        return 0
    return graphs * _GRAPH_BYTES + _WORKSPACE_BYTES + rows * (4 * 8 + blocks * 4 + vocabulary * item_bytes)


__all__ = [
    "Geometry",
    "KvPlan",
    "Least",
    "activation_bytes",
    "graph_bytes",
    "logits_bytes",
    "plan_kv_cache",
    "plan_to_record",
    "recorded_plan",
    "token_bytes",
]
