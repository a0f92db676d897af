"""The copies to a device that are in flight (ParaServe §5.2: the parameter manager's streams)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from medusa_runtime.load.upload.link import Copy, Link
from medusa_runtime.region.file_range import FileRange

# Limits how much of the host's memory is held for copies, and of the device's for tensors whose dtype is converted.
# While another thread computes in Python, a load's thread gets the interpreter's lock every few milliseconds, in each
# of which a PCIe 5 link carries 55 MB.
_IN_FLIGHT_BYTES = 512 << 20
_COPY_CHECK_S = 0.0002  # how often a wait looks for copies that are done


@dataclass(slots=True)
class _Upload:
    name: str
    copy: Copy
    size_bytes: int


class Uploads:
    """The copies that have begun and are not known to be done. Belongs to one thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._running: deque[_Upload] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether another copy may begin."""
        return self._bytes < _IN_FLIGHT_BYTES

    def begin(
        self, name: str, target: Tensor, source: Tensor, *, urgent: bool, stored: FileRange | None = None
    ) -> None:
        """Begin to copy ``source`` to ``target``, as ``Link.copy`` does; ``finished`` will report it by its name."""
        upload = _Upload(name, self._link.copy(target, source, urgent=urgent, stored=stored), source.nbytes)
        self._running.append(upload)
        self._bytes += upload.size_bytes

    def finished(self) -> list[str]:
        """Return the names of copies that are done, each once, in any order: urgent copies overtake others."""
        done, running = list[_Upload](), deque[_Upload]()
        for upload in self._running:
            (done if upload.copy.done() else running).append(upload)
        self._running = running
        self._bytes -= sum(upload.size_bytes for upload in done)
        return [upload.name for upload in done]

    def wait(self, check: Callable[[], None]) -> list[str]:
        """Wait until at least one copy is done, and return the names. ``check`` is called meanwhile and may raise."""
        while not (names := self.finished()):
            check()
            time.sleep(_COPY_CHECK_S)
        return names
