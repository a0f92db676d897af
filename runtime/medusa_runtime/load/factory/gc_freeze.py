"""Keeping Python's garbage collector away from imported code while a model is loaded.

A process that has imported torch has some hundred thousand objects. A full collection visits each one, which takes a
tenth of a second in the middle of a cold start and finds nothing. Constructing a model of a hundred layers triggers
one.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_loads = 0
_frozen_by_others = False  # noted once: a large process counts for a tenth of a second what is frozen in it


def freeze() -> None:
    """Exempt all objects that exist now from collections until ``thaw``. Loads that overlap are counted."""
    global _loads, _frozen_by_others
    with _lock:
        if not _loads and not _frozen_by_others:
            _frozen_by_others = gc.get_freeze_count() > 0
        if not _frozen_by_others:  # else the user has frozen objects, and will thaw them
            _loads += 1
            if _loads == 1:
                gc.freeze()


def thaw() -> None:
    """Undo one ``freeze``. Does nothing if that had no effect."""
    global _loads
    with _lock:
        if _loads:
            _loads -= 1
            if not _loads:
                gc.unfreeze()
