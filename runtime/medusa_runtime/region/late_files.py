"""Late files, which a region gets after its index: large artifacts of a state bundle, fetched beside the weights."""

from __future__ import annotations

import json
import threading

from .layout import LateFileState, Word
from .memory import WriterMemory


class LateFiles:
    """The writer's side of the late files. The region must be laid out, so their memory is there.

    The byte in front of each file is its state, which readers wait for.
    """

    def __init__(self, memory: WriterMemory) -> None:
        self._memory = memory
        self._settling = threading.Lock()
        start = memory.words[Word.FILES_OFFSET]
        places = json.loads(bytes(memory.bytes[start : start + memory.words[Word.FILES_BYTES]]))
        self._places: dict[str, list[int]] = {name: place for name, place in places.items() if len(place) == 3}

    def pending(self) -> dict[str, memoryview]:
        """Return, by name, the memory of the files that are neither published nor withheld yet."""
        data = self._memory.bytes
        return {
            name: data[start : start + length]
            for name, (start, length, state) in self._places.items()
            if data[state] == LateFileState.PENDING
        }

    def publish(self, name: str) -> None:
        """Let readers have a file, whose bytes must all be in its memory."""
        self._settle(name, LateFileState.PRESENT)

    def withhold(self, name: str) -> None:
        """Let readers know that a file will not come."""
        self._settle(name, LateFileState.WITHHELD)

    def _settle(self, name: str, state: LateFileState) -> None:
        with self._settling:  # a memory barrier, so that CPUs that reorder stores store the bytes before the state
            self._memory.bytes[self._places[name][2]] = state
