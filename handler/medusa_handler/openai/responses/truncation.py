"""``truncation: auto``: the oldest turns of a conversation are left out until the rest fits the model's context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]


def truncate(messages: Sequence[Message], fits: Callable[[list[Message]], bool]) -> list[Message]:
    """Return the messages without the oldest turns, so that they fit if the last turn does.

    A turn begins with a user's message, so that a call and its output stay together. Instructions before the first turn
    are kept. ``fits`` is called about as many times as the number of turns has binary digits.
    """
    starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if len(starts) < 2 or fits(list(messages)):
        return list(messages)
    head = [message for message in messages[: starts[0]] if message["role"] in ("system", "developer")]
    low, high = 1, len(starts) - 1  # the first of the turns that are kept
    while low < high:
        middle = (low + high) // 2
        if fits([*head, *messages[starts[middle] :]]):
            high = middle
        else:
            low = middle + 1
    return [*head, *messages[starts[low] :]]
