"""A function of a module that is another one for a while."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def instead(place: str, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """In this context ``name`` of the module ``place`` is ``function``, whose first argument is the one it replaces.

    What is not there stays away: it may be another version of vLLM.
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


__all__ = ["instead"]
