"""Python's garbage collector while a model is loaded: it looks at what the load makes, not at all that was imported.

A process with torch in it has some hundred thousand objects, which a full collection looks at one by one: a tenth of a
second, in the middle of a cold start, and it finds nothing. Constructing a model of a hundred layers brings one about.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_loads = 0


def freeze() -> None:
    """Leave out what is there now until ``thaw``; loads at the same time are counted."""
    global _loads
    with _lock:
        if _loads or not gc.get_freeze_count():  # else the user has frozen what is there, and thaws it
            _loads += 1
            if _loads == 1:
                gc.freeze()


def thaw() -> None:
    """The end of one load. May be called without ``freeze`` having had an effect."""
    global _loads
    with _lock:
        if _loads:
            _loads -= 1
            if not _loads:
                gc.unfreeze()
