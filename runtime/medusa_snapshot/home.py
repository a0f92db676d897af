"""The user's home folder, which modules note when they are imported: another one in each process of a snapshot."""

from __future__ import annotations

import os
import sys
import tempfile

from .conditions import namespace

TYPE_CHECKING = False  # typing takes several milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Any


class NotedHome:
    """In its context, HOME is an empty folder, so that what modules note there can be told from everything else.

    ``renew`` then changes it to what it would be in this process.
    """

    def __enter__(self) -> NotedHome:
        self._home = tempfile.mkdtemp(prefix="home-of-a-snapshot-")
        self._old = os.environ.get("HOME")
        os.environ["HOME"] = self._home
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import shutil

        if self._old is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = self._old
        shutil.rmtree(self._home, ignore_errors=True)
        self._noted = list(self._find())

    def renew(self) -> None:
        home = os.path.expanduser("~")
        for owner, name in self._noted:
            value = namespace(owner)[name]
            setattr(owner, name, type(value)(str(value).replace(self._home, home, 1)))

    def _find(self) -> Iterator[tuple[Any, str]]:
        for module in list(sys.modules.values()):
            for name, value in list(namespace(module).items()):
                if self._is_below(value):
                    yield module, name
                elif issubclass(type(value), type) and value.__module__ == module.__name__:
                    yield from ((value, each) for each, path in namespace(value).items() if self._is_below(path))

    def _is_below(self, value: object) -> bool:
        kind = type(value)  # to ask the value for its class would wake lazy objects
        return (issubclass(kind, str) or hasattr(kind, "__fspath__")) and str(value).startswith(self._home)
