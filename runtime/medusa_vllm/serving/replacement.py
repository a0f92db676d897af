"""A temporary replacement for a function of a module."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


__all__ = ["patch_function"]
