"""Progress of a fetch for a person: one moving line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_runtime.region.reader import Progress

_PLAIN_EVERY_S = 5.0
_BAR_CELLS = 24
CLEAR_LINE = "\r\x1b[2K"


class ProgressLine:
    """A progress line, written with ``write``; ``end`` leaves the terminal at the start of an empty line."""

    def __init__(self, write: Callable[[str], None], *, moving: bool) -> None:
        self._write = write
        self._moving = moving
        self._shown = False
        self._complete = False
        self._next_s = time.monotonic() + _PLAIN_EVERY_S

    def show(self, progress: Progress) -> None:
        """Show how much has been fetched, and once that everything has."""
        if not progress.total_bytes or self._complete:
            return
        self._complete = progress.state == "done"
        if self._moving:
            done = int(_BAR_CELLS * progress.fetched_bytes / progress.total_bytes)
            self._write(f"{CLEAR_LINE}{'█' * done}{'░' * (_BAR_CELLS - done)} {describe(progress)}")
            self._shown = True
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PLAIN_EVERY_S
            self._write(f"fetching: {describe(progress)}\n")

    def end(self) -> None:
        if self._shown:
            self._write(CLEAR_LINE)
            self._shown = False


def note(text: str) -> None:
    """Print what a long command is doing to stderr; stdout is for its result."""
    print(text, file=sys.stderr, flush=True)


def describe(progress: Progress) -> str:
    """Format progress as in ``412 MB of 1.6 GB (26 %), 734 MB/s, 2 s left``."""
    total = max(progress.total_bytes, 1)
    parts = [f"{size(progress.fetched_bytes)} of {size(total)} ({100 * progress.fetched_bytes // total} %)"]
    if progress.mb_per_s:
        parts.append(f"{progress.mb_per_s:,.0f} MB/s")
    if progress.eta_s and progress.fetched_bytes < total:
        parts.append(f"{progress.eta_s:.0f} s left")
    return ", ".join(parts)


def size(count: int) -> str:
    """Format bytes for a person, in powers of 1000: 57.2 MB."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
