"""Vectors of texts. A request waits while the model loads, and ends when the client leaves."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_runtime.engine.base import Embedding, EmbedOptions

    from .served_model import ServedModel

Input = str | tuple[int, ...] | tuple[str, str]

_BATCH = 64  # inputs given to the engine at once; between batches it is noticed that a client has left


def embeddings(
    model: ServedModel,
    inputs: Sequence[Input],
    is_disconnected: Callable[[], bool],
    options: EmbedOptions,
) -> list[Embedding]:
    """Return a vector for each input, in order; a classifier's has the probabilities of its labels.

    Raises RequestError, EngineError, ClientDisconnectedError, and ApiError 503 after ``hold_s``.
    """
    assert model.engine is not None
    wait_check = model.wait_check(is_disconnected)
    found: dict[int, Embedding] = {}
    # Inputs of similar length share a batch, so that there is little padding.
    order = sorted(range(len(inputs)), key=lambda number: len(inputs[number]))
    for start in range(0, len(order), _BATCH):
        numbers = order[start : start + _BATCH]
        batch = [inputs[number] for number in numbers]
        found |= zip(
            numbers,
            model.engine.embed(batch, options, wait_check=wait_check),
            strict=True,
        )
    return [found[number] for number in range(len(inputs))]


def floats(data: bytes) -> list[float]:
    """Return a vector's bytes (float32) as numbers."""
    return array("f", data).tolist()
