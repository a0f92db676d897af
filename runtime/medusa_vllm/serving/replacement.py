"""A temporary replacement for a function of a module."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def patch_function(place: str, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``name`` of the module ``place`` is ``function``. Its first argument is the replaced one.

    A name that does not exist is not added, because this may be another version of vLLM.
    """
    try:
        module = importlib.import_module(place)
        before = getattr(module, name)
    except (ImportError, AttributeError):
        yield
        return
    setattr(module, name, functools.partial(function, before))
    try:
        yield
    finally:
        setattr(module, name, before)


_entry_points: Any = None


def read_entry_points() -> None:
    """Read the metadata of every installed package, for ``cached_entry_points`` in this process and its forks."""
    global _entry_points
    _entry_points = importlib.metadata.entry_points()


def cached_entry_points() -> AbstractContextManager[None]:
    """Let vLLM look for plugins in what this process, or the one that it was forked from, has read already.

    Each of its searches reads the metadata of every installed package.
    """
    found: Any = importlib.metadata.entry_points() if _entry_points is None else _entry_points
    return patch_function("importlib.metadata", "entry_points", lambda before, **chosen: found.select(**chosen))


__all__ = ["cached_entry_points", "patch_function", "read_entry_points"]
