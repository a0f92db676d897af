"""An engine's LoRA adapters: they are loaded in the background, and each is applied to its rows of a step."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ...errors import EngineError, MedusaError, RequestError, StorageError, from_code, json_excerpt
from ...models.base import DecoderModel
from ...models.layers.lora import AdaptedLayer, AdapterStep, Pairs
from ...region.reader import Region
from ...timeline import Timeline
from ..serving.sequence import Sequence, Span

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.25  # how often a call that waits checks whether it was cancelled


class Adapter:
    """One adapter. When ``loaded`` is set, it has ``pairs`` or an ``error``.

    ``number`` is unique in the engine; a step's spans are sorted by it.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.pairs: Pairs | None = None
        self.size_bytes = 0
        self.error: MedusaError | None = None
        self.loaded = threading.Event()


class Adapters:
    """The adapters of one engine, by name.

    Any thread may add, drop, find and wait. ``defer``, ``group_by_adapter`` and ``end_misfits`` belong to the engine's
    thread. A dropped adapter lives on while a sequence uses it.

    Four functions connect this to the engine: ``base_loaded`` waits for the base model's weights, ``post`` runs a call
    in the engine's thread, ``begin`` starts a sequence whose adapter has been loaded, and ``fail`` ends a sequence with
    an error.
    """

    def __init__(
        self,
        model: DecoderModel,
        dtype: torch.dtype,
        timeline: Timeline,
        *,
        most_rank: int,
        base_loaded: Callable[[], None],
        post: Callable[[Callable[[], object]], None],
        begin: Callable[[Sequence], None],
        fail: Callable[[Sequence, MedusaError], None],
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._timeline = timeline
        self._most_rank = most_rank
        self._base_loaded = base_loaded
        self._post = post
        self._begin = begin
        self._fail = fail
        self._step = AdapterStep()
        self._adapters: dict[str, Adapter] = {}
        self._waiting: dict[Adapter, list[Sequence]] = defaultdict(list)  # for an adapter that is being loaded
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._adapters)

    def add(self, name: str, region: Region) -> None:
        """Start loading an adapter from its region, and close the region afterwards. Replaces one of the same name."""
        adapter = Adapter(name, next(self._numbers))
        self._adapters[name] = adapter
        threading.Thread(target=self._load, args=(adapter, region), name="engine-adapter", daemon=True).start()

    def refuse(self, name: str, error: MedusaError) -> None:
        """Answer every request that names this adapter with an error."""
        adapter = Adapter(name, next(self._numbers))
        adapter.error = error
        adapter.loaded.set()
        self._adapters[name] = adapter  # last, so that no request waits for an adapter that will never be loaded

    def drop(self, name: str) -> bool:
        """Forget an adapter, and return whether there was one of this name."""
        return self._adapters.pop(name, None) is not None

    def find(self, name: str) -> Adapter:
        """Return the adapter of this name. Raises RequestError for an unknown name."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise RequestError(
                f"model: expected the name of an adapter of this engine, found {json_excerpt(name)}", "model"
            )
        return adapter

    def wait(self, name: str, cancelled: threading.Event | None = None) -> dict[str, Any]:
        """Wait until an adapter is loaded, and return its numbers of layers and bytes.

        Raises RequestError if it is unknown or cannot be used, StorageError if its weights could not be fetched, and
        EngineError once ``cancelled`` is set.
        """
        adapter = self.find(name)
        while not adapter.loaded.wait(None if cancelled is None else _CHECK_EVERY_S):
            if cancelled is not None and cancelled.is_set():
                raise EngineError("the request was cancelled")
        if adapter.error is not None:
            raise adapter.error
        return {"layers": len(adapter.pairs or ()), "bytes": adapter.size_bytes}

    def defer(self, sequence: Sequence) -> bool:
        """Return whether a sequence cannot begin now. It waits for its adapter then, or has failed with its error."""
        adapter = sequence.adapter
        if adapter is None or adapter.pairs is not None:
            return False
        if adapter.error is not None:
            self._fail(sequence, adapter.error)
        else:
            self._waiting[adapter].append(sequence)
        return True

    def group_by_adapter(self, spans: list[Span]) -> list[Span]:
        """Return a step's spans ordered by adapter, and note which rows of the step belong to each adapter."""
        step = self._step
        if not any(span.sequence.adapter is not None for span in spans):
            step.groups = ()
            return spans
        ordered = sorted(spans, key=lambda span: 0 if span.sequence.adapter is None else span.sequence.adapter.number)
        groups: list[tuple[Pairs, slice]] = []
        at = 0
        for _, same in itertools.groupby(ordered, key=lambda span: span.sequence.adapter):
            members = list(same)
            stop = at + sum(span.stop - span.start for span in members)
            adapter = members[0].sequence.adapter
            if adapter is not None and adapter.pairs is not None:
                groups.append((adapter.pairs, slice(at, stop)))
            at = stop
        step.groups, step.tokens = groups, at
        step.misfits.clear()
        return ordered

    def end_misfits(self, spans: list[Span]) -> None:
        """End the sequences whose adapter could not be applied. Call it after each step."""
        step = self._step
        used = [span.sequence for span in spans if span.sequence.adapter is not None]
        for adapter in {sequence.adapter for sequence in used} if step.groups and step.misfits else ():
            assert adapter is not None
            if misfit := min(step.misfits.intersection(adapter.pairs or ()), default=""):
                adapter.error = RequestError(
                    f"model: {misfit} is not given all tokens of a step, so no adapter can change it; expected an "
                    "adapter without it, or one that is merged into the base model",
                    "model",
                )
                adapter.pairs = None
        for sequence in used:  # also those whose adapter was refused while they waited for their first step
            if sequence.adapter is not None and sequence.adapter.error is not None:
                sequence.cancelled = True
                self._fail(sequence, sequence.adapter.error)

    def _load(self, adapter: Adapter, region: Region) -> None:
        """Load an adapter, in a thread of its own."""
        from .adapter_weights import read_adapter

        try:
            with self._timeline.stage("adapter", adapter=adapter.name) as detail, torch.inference_mode():
                self._base_loaded()
                found = read_adapter(region, self._model, self._dtype, most_rank=self._most_rank)
                for name, layer in found.layers.items():
                    layer.adapted = AdaptedLayer(name, self._step)
                adapter.size_bytes = found.size_bytes
                adapter.pairs = found.pairs
                detail |= {"layers": len(found.pairs), "bytes": found.size_bytes}
        except StorageError as error:
            adapter.error = from_code(error.code, f"the adapter {adapter.name} could not be fetched: {error}")
        except MedusaError as error:
            adapter.error = RequestError(f"the adapter {adapter.name} cannot be used: {error}", "model")
        except Exception as error:
            logger.exception("the adapter %s could not be loaded", adapter.name)
            adapter.error = EngineError(f"the adapter {adapter.name} could not be loaded: {type(error).__name__}")
        finally:
            region.close()
            adapter.loaded.set()
            self._post(lambda: self._arrived(adapter))

    def _arrived(self, adapter: Adapter) -> None:
        for sequence in self._waiting.pop(adapter, ()):
            if sequence.cancelled:
                continue
            if adapter.error is not None:
                self._fail(sequence, adapter.error)
            else:
                self._begin(sequence)


__all__ = ["Adapter", "Adapters"]
