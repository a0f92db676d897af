"""JSON of a request's body, as a function parses it."""

from __future__ import annotations

import gc

from medusa_handler.contract import Headers, Request


def test_the_garbage_collector_does_not_look_through_a_large_body_again_and_again() -> None:
    """It took most of the time, in which no other request was answered."""
    request = Request("POST", "/", Headers([]), {}, b"[" + b"[]," * 400_000 + b"[]]", "id")
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        value = request.json
    finally:
        gc.callbacks.remove(note)
    assert len(value) == 400_001
    assert len(collections) <= 4, "one or two when it is on again"
