"""Modules that are imported now and executed when something asks them for a name.

``importlib.util.LazyLoader`` executes at any access, that of ``__spec__`` by a second import statement included; these
modules do so only for a name that they do not have yet. Before that they may hold *stand-ins*: a few names that
importers bind early and use late, or never.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

_STATE = "__medusa_deferred__"
_MEANINGFUL_DUNDERS = {"__all__", "__version__"}
_lock = threading.RLock()  # one for all: a module that executes pulls others in, in any order


class DeferredModule(ModuleType):
    """Executed at the first missing name; afterwards an ordinary module. Its parents are executed before it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _MEANINGFUL_DUNDERS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")  # asking must not execute
        execute(self)
        try:
            return vars(self)[name]
        except KeyError:
            fallback = vars(self).get("__getattr__")
            if fallback is not None:
                return fallback(name)
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


def execute(module: ModuleType) -> None:
    """Run a deferred module's code; nothing to do for one that ran, or is running further up this thread's stack."""
    with _lock:
        deferral: _Deferral | None = vars(module).get(_STATE)
        if deferral is None or deferral.running:
            return
        for name in deferral.before:
            execute(importlib.import_module(name))
        if deferral.running or _STATE not in vars(module):  # executed on the way, by one of those
            return
        deferral.running = True
        try:
            deferral.loader.exec_module(module)
            if deferral.after is not None:
                deferral.after()
        finally:
            vars(module).pop(_STATE, None)
            if type(module) is DeferredModule:
                object.__setattr__(module, "__class__", ModuleType)


class StandIn:
    """What an importer binds in place of the real object, which is looked up at the first use."""

    def __init__(self, resolve: Callable[[], Any]) -> None:
        self._resolve = resolve

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._resolve()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._resolve(), name)

    @classmethod
    def of(cls, module: str, name: str) -> StandIn:
        return cls(lambda: getattr(importlib.import_module(module), name))

    def real(self) -> Any:
        return self._resolve()


class _Deferral(Loader):
    """The loader of one deferred module: remembers the real one."""

    def __init__(
        self,
        loader: SourceFileLoader,
        before: Sequence[str],
        after: Callable[[], None] | None,
        names: Mapping[str, Any],
    ) -> None:
        self.loader = loader
        self.before = before
        self.after = after
        self.running = False
        self._names = names

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self.loader
        vars(module).update(self._names)
        vars(module)[_STATE] = self


class _Loaded(Loader):
    """For a child that executing its parent has imported already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Executed already."""


class Deferrer(MetaPathFinder):
    """While on ``sys.meta_path``: defers the modules of ``packages``, but for those in ``eager``.

    ``before`` names, for some modules, those to execute first, in place of the parent; ``after`` is called when a
    module was executed. The children of a package in ``whole`` are not deferred; the first of them executes it.
    """

    def __init__(
        self,
        packages: Sequence[str],
        *,
        eager: frozenset[str] = frozenset(),
        whole: frozenset[str] = frozenset(),
        before: Mapping[str, Sequence[str]] | None = None,
        after: Mapping[str, Callable[[], None]] | None = None,
        stand_ins: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._packages = tuple(packages)
        self._eager = eager
        self._whole = whole
        self._before = before or {}
        self._after = after or {}
        self._stand_ins = stand_ins or {}
        self._names: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, below = name.partition(".")
        if package not in self._packages or name in self._eager:
            return None
        if below and package in self._whole:
            execute(sys.modules[package])
            return ModuleSpec(name, _Loaded()) if name in sys.modules else None
        spec = self._real_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        parent = name.rpartition(".")[0]
        before = self._before.get(name, (parent,) if parent else ())
        spec.loader = _Deferral(spec.loader, before, self._after.get(name), self._stand_ins.get(name, {}))
        self._names.append(name)
        return spec

    def _real_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def pending(self) -> Iterator[ModuleType]:
        """The modules that still wait, in the order of their first import."""
        for name in self._names:
            module = sys.modules.get(name)
            if module is not None and _STATE in vars(module):
                yield module
