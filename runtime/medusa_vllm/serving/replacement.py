"""A function of a module that is another one for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def instead(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """In this context ``module.name`` is ``function``, which gets the one that it replaces as its first argument.

    A module without that name stays as it is: it may be another version's.
    """
    before = getattr(module, name, None)
    if before is None:
        yield
        return
    setattr(module, name, functools.partial(function, before))
    try:
        yield
    finally:
        setattr(module, name, before)


__all__ = ["instead"]
