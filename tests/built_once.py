"""Compiles a library once, for all processes that run the tests."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_workers import shared_folder


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """The folder of this name, which the first process that wants it makes and has ``build`` fill.

    The others wait meanwhile. If ``build`` raises, the next one tries again.
    """
    base = shared_folder(factory)
    folder = base / name
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = factory.mktemp(name)
            build(unfinished)
            unfinished.rename(folder)
    return folder
