"""One LoRA adapter of an engine."""

from __future__ import annotations

import threading

from ...errors import MedusaError
from ...models.layers.lora import Pairs


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
