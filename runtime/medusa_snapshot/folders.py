"""Folders of a user, which modules note when they are imported: other ones in each process of a snapshot."""

from __future__ import annotations

import os
import sys
import tempfile
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType

from .conditions import namespace

TYPE_CHECKING = False  # typing takes several milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType
    from typing import Any

_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)  # Python's own, not those of lazy objects


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
            if type(owner) is dict:
                owner[name] = self._new(owner[name])
            else:
                setattr(owner, name, self._new(_attributes(owner)[name]))

    def _new(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self._new, value))
        return type(value)(self._renewed(str(value))) if self._is_below(value) else value

    def _renewed(self, path: str) -> str:
        if path.startswith(self._home):
            return path.replace(self._home, os.path.expanduser("~"), 1)
        path = path.replace(self._temporary, tempfile.gettempdir(), 1)
        return path.replace(self._user, _user()) if self._user in path else path

    def _find(self) -> Iterator[tuple[Any, str]]:
        """Find them in modules, and in the dictionaries, objects, classes and functions' defaults of modules."""
        for module in list(sys.modules.values()):
            for name, value in list(namespace(module).items()):
                if self._is_below(value):
                    yield module, name
                elif type(value) is dict:  # such as sysconfig's variables
                    yield from ((value, each) for each, path in value.items() if self._is_below(path))
                elif not issubclass(type(value), type) or value.__module__ == module.__name__:
                    yield from self._find_in(value)

    def _find_in(self, owner: Any) -> Iterator[tuple[Any, str]]:
        for name, value in list(_attributes(owner).items()):
            if self._is_below(value):
                yield owner, name
            elif type(value) is FunctionType:
                yield from self._find_in(value)
            elif type(owner) is FunctionType and any(map(self._is_below, value or ())):
                yield owner, name

    def _is_below(self, value: object) -> bool:
        kind = type(value)  # to ask the value for its class would wake lazy objects
        return (issubclass(kind, str) or hasattr(kind, "__fspath__")) and str(value).startswith(self._all)


def _attributes(owner: Any) -> Mapping[str, Any]:
    """Return what an object, a class, a module or a function has, without a lookup that could wake lazy objects."""
    if type(owner) is FunctionType:
        return {"__defaults__": owner.__defaults__}
    for kind in type(owner).__mro__:
        if (found := namespace(kind).get("__dict__")) is not None:
            return found.__get__(owner) if type(found) in _DESCRIPTORS else {}
    return {}


def _user() -> str:
    """Return this process's user as torch names folders for it: by the number if it has no name."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):
        return f"uid_{os.getuid()}"
