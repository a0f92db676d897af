"""Folders of a user, which modules note when they are imported: other ones in each process of a snapshot."""

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


class NotedFolders:
    """In its context, HOME, the folder for temporary files and the user's name are ones that nothing else has.

    What modules note of them can so be told from everything else, and ``renew`` changes it to what it would be in this
    process.
    """

    def __enter__(self) -> NotedFolders:
        self._all = tempfile.mkdtemp(prefix="folders-of-a-snapshot-")
        self._home, self._temporary = (os.path.join(self._all, name) for name in ("home", "temporary"))
        self._user = os.path.basename(self._all)
        given = {"HOME": self._home, "TMPDIR": self._temporary, "LOGNAME": self._user}
        for folder in (self._home, self._temporary):
            os.mkdir(folder)
        self._old = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        tempfile.tempdir = None  # it is chosen by the environment, once
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import shutil

        for name, value in self._old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(self._all, ignore_errors=True)
        self._noted = list(self._find())

    def renew(self) -> None:
        for owner, name in self._noted:
            values = owner if type(owner) is dict else namespace(owner)
            new = type(values[name])(self._renewed(str(values[name])))
            if values is owner:
                owner[name] = new
            else:
                setattr(owner, name, new)

    def _renewed(self, path: str) -> str:
        if path.startswith(self._home):
            return path.replace(self._home, os.path.expanduser("~"), 1)
        path = path.replace(self._temporary, tempfile.gettempdir(), 1)
        return path.replace(self._user, _user()) if self._user in path else path

    def _find(self) -> Iterator[tuple[Any, str]]:
        for module in list(sys.modules.values()):
            for name, value in list(namespace(module).items()):
                if self._is_below(value):
                    yield module, name
                elif type(value) is dict:  # such as sysconfig's variables
                    yield from ((value, each) for each, path in value.items() if self._is_below(path))
                elif issubclass(type(value), type) and value.__module__ == module.__name__:
                    yield from ((value, each) for each, path in namespace(value).items() if self._is_below(path))

    def _is_below(self, value: object) -> bool:
        kind = type(value)  # to ask the value for its class would wake lazy objects
        return (issubclass(kind, str) or hasattr(kind, "__fspath__")) and str(value).startswith(self._all)


def _user() -> str:
    """Return this process's user as torch names folders for it: by the number if it has no name."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):
        return f"uid_{os.getuid()}"
