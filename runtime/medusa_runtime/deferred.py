"""Modules that are imported now and executed when something asks them for a name.

``importlib.util.LazyLoader`` executes at any access, that of ``__spec__`` by a second import statement included; these
modules do so only for a name that they do not have yet. Before that they may hold *stand-ins*: a few names that
importers bind early and use late, or never.

Packages with import cycles cannot be executed from any end. So while ``lean`` imports, a module is executed alone when
it is asked; later, the first question that a module cannot answer executes all that is pending, in the order of the
imports, unless the module is known to stand ``alone``.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)
_STATE = "__medusa_deferred__"
_MEANINGFUL_DUNDERS = {"__all__", "__version__"}
_lock = threading.RLock()  # one for all: a module that executes pulls others in, in any order


class DeferredModule(ModuleType):
    """Executed at the first missing name; an ordinary module when its ``Deferrer`` has completed."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") or name in _MEANINGFUL_DUNDERS:  # asking for others must not execute
            supply(self)
            if name in vars(self):
                return vars(self)[name]
            fallback = vars(self).get("__getattr__")
            if fallback is not None:
                return fallback(name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def supply(module: ModuleType) -> None:
    """Execute what may give ``module`` the names that it does not have."""
    with _lock:
        deferral: _Deferral | None = vars(module).get(_STATE)
        if deferral is None or deferral.running:
            return
        if deferral.finder.must_complete(module.__name__):
            logger.info("executing all that was deferred: %s was asked for what it does not have", module.__name__)
            deferral.finder.complete()
        else:
            execute(module)


def execute(module: ModuleType) -> None:
    """Run a deferred module's code; nothing to do for one that ran, or is running further up this thread's stack."""
    with _lock:
        deferral: _Deferral | None = vars(module).get(_STATE)
        if deferral is None or deferral.running or deferral.executed:
            return
        for name in deferral.before:
            execute(importlib.import_module(name))
        if deferral.running or deferral.executed:  # on the way, by one of those
            return
        deferral.running = True
        try:
            deferral.loader.exec_module(module)
            deferral.executed = True
            if deferral.after is not None:
                deferral.after()
        finally:
            deferral.running = False


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
        def resolve() -> Any:
            owner = importlib.import_module(module)
            supply(owner)  # which replaces this stand-in there
            return getattr(owner, name)

        return cls(resolve)

    def real(self) -> Any:
        return self._resolve()


@dataclass(eq=False)
class _Deferral(Loader):
    """The loader of one deferred module, and its state."""

    finder: Deferrer
    loader: Any
    before: Sequence[str] = ()
    after: Callable[[], None] | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    running: bool = False
    executed: bool = False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self.loader
        vars(module).update(self.names)
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
    module was executed. The children of a package in ``whole`` are not deferred; the first of them executes it. Modules
    in ``alone`` and below never make the others execute. ``around`` is the context in which
    all are executed, ``on_complete`` is called at its end.
    """

    def __init__(
        self,
        packages: Sequence[str],
        *,
        eager: frozenset[str] = frozenset(),
        whole: frozenset[str] = frozenset(),
        alone: Sequence[str] = (),
        before: Mapping[str, Sequence[str]] | None = None,
        after: Mapping[str, Callable[[], None]] | None = None,
        stand_ins: Mapping[str, Mapping[str, Any]] | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._packages = tuple(packages)
        self._eager = eager
        self._whole = whole
        self._alone = tuple(alone)
        self._before = before or {}
        self._after = after or {}
        self._stand_ins = stand_ins or {}
        self._around = around
        self._on_complete = on_complete
        self._names: list[str] = []
        self._one_by_one = True

    def lean(self, package: str) -> ModuleType:
        """Import ``package``, itself one of the eager."""
        sys.meta_path.insert(0, self)
        module = importlib.import_module(package)
        module.__class__ = DeferredModule
        vars(module)[_STATE] = _Deferral(self, module.__loader__, executed=True)
        self._names.append(package)
        self._one_by_one = False
        return module

    def must_complete(self, name: str) -> bool:
        """Whether a question that the module ``name`` cannot answer is one for all modules."""
        if self._one_by_one or name.partition(".")[0] in self._whole:
            return False
        return not any(name == alone or name.startswith(alone + ".") for alone in self._alone)

    def complete(self) -> None:
        """Execute all that is pending. Idempotent."""
        with _lock:
            if self not in sys.meta_path or self._one_by_one:
                return
            self._one_by_one = True
            with self._around():
                while pending := list(self.pending()):
                    for module in pending:
                        execute(module)
                sys.meta_path.remove(self)
                for name in self._names:
                    self._make_ordinary(sys.modules.get(name))
                self._on_complete()

    def pending(self) -> Iterator[ModuleType]:
        """The modules that still wait, in the order of their first import."""
        for name in self._names:
            module = sys.modules.get(name)
            deferral: _Deferral | None = vars(module).get(_STATE) if module is not None else None
            if module is not None and deferral is not None and not (deferral.executed or deferral.running):
                yield module

    @staticmethod
    def _make_ordinary(module: ModuleType | None) -> None:
        if type(module) is DeferredModule:
            del vars(module)[_STATE]
            object.__setattr__(module, "__class__", ModuleType)

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
        spec.loader = _Deferral(self, spec.loader, before, self._after.get(name), self._stand_ins.get(name, {}))
        self._names.append(name)
        return spec

    def _real_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None
