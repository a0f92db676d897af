"""Modules that are imported now and executed when something asks them for a name.

``importlib.util.LazyLoader`` executes at any access, that of ``__spec__`` by a second import statement included; these
modules do so for a name that they do not have yet, for the list of their names, and before another name is set. While
their package is imported they hold *stand-ins*: a few names that importers bind early and use late, or never.

Packages with import cycles cannot be executed from any end. So while ``lean`` imports, a module is executed alone when
it is asked; later, the first question that a module cannot answer executes all that is pending, in the order of the
imports, unless the module is known to stand ``alone``.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from .lock import ImportLock

logger = logging.getLogger(__name__)
_STATE = "__medusa_deferred__"
_FRAMES = 1000  # Python's own limit: as many as any import finds at the start of a program
_MEANINGFUL_DUNDERS = {"__all__", "__version__"}
_lock = ImportLock()  # one for all: a module that executes pulls others in, in any order
# A module's names as they are, where ``vars`` would have them completed first.
names_of: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__


class DeferredModule(ModuleType):
    """Executed at the first missing name; an ordinary module when its ``LazyFinder`` has completed."""

    def __getattr__(self, name: str) -> Any:
        names = names_of(self)
        deferral: _Deferral | None = names.get(_STATE)
        asks = not name.startswith("__") or name in _MEANINGFUL_DUNDERS
        if asks and not (deferral and f"{self.__name__}.{name}" in deferral.finder.nowhere):
            supply(self)
            if name in names:
                return names[name]
            if deferral is not None and name in deferral.late:
                return names.setdefault(name, deferral.late[name].real())
            fallback = names.get("__getattr__")
            if fallback is not None:
                return fallback(name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # Executing it later would undo what is set now; but importing a child sets it, and asks for nothing.
        meant = not name.startswith("__") and not isinstance(value, ModuleType)
        if meant and _is_incomplete(self) and not names_of(self)[_STATE].executed:
            supply(self)
        ModuleType.__setattr__(self, name, value)  # it may have become one

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # which dir() asks, too
        if _is_incomplete(self):
            supply(self)
        return names_of(self)


def _is_incomplete(module: ModuleType) -> bool:
    deferral: _Deferral | None = names_of(module).get(_STATE)
    if deferral is None or deferral.running or not deferral.finder.ready:
        return False
    return bool(deferral.late or not deferral.executed)


def supply(module: ModuleType) -> None:
    """Execute what may give ``module`` the names that it does not have."""
    with _lock.held():
        deferral: _Deferral | None = names_of(module).get(_STATE)
        if deferral is None or deferral.running:
            return
        if deferral.finder.must_complete(module.__name__):
            logger.info("executing all that was deferred: %s was asked for what it does not have", module.__name__)
            deferral.finder.complete()
        else:
            execute(module)


def execute(module: ModuleType) -> None:
    """Run a deferred module's code; nothing to do for one that ran, or is running further up this thread's stack."""
    with _lock.held():
        deferral: _Deferral | None = names_of(module).get(_STATE)
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

    finder: LazyFinder
    loader: Any
    before: Sequence[str] = ()
    after: Callable[[], None] | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    late: dict[str, StandIn] = field(default_factory=dict)  # its stand-ins, taken back
    running: bool = False
    executed: bool = False

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self.loader
        names_of(module).update(self.names)
        names_of(module)[_STATE] = self


@dataclass(eq=False)
class _Root(Loader):
    """The loader of the package itself, which is executed at once."""

    finder: LazyFinder
    loader: Any

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self.loader
        self.finder.run(module)


@dataclass(eq=False)
class _Undecided(Loader):
    """Asks its finder, which may wait for other threads: those may want the lock that is held when a spec is found."""

    finder: LazyFinder
    loader: Any

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.finder.create(spec, self.loader)

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError("decided when the module was created")


@dataclass(eq=False)
class _Loaded(Loader):
    """For a module that was imported on the way to its own import."""

    spec: ModuleSpec | None

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class LazyFinder(MetaPathFinder):
    """Once ``install``-ed and ``package`` imported: defers the modules of ``packages``, but for those in ``eager``.

    ``before`` names, for some modules, those to execute first, in place of the parent; ``after`` is called when a
    module was executed. The children of a package in ``whole`` are not deferred; the first of them executes it. Modules
    in ``alone`` and below never make the others execute; names in ``nowhere`` (``module.name``) execute nothing.
    ``stand_ins`` are there while ``package`` is imported, also in the executed modules of ``open``; ``lasting`` ones
    until their module is executed. ``importing`` is the context of the import, ``around`` that in which all are
    executed, ``on_complete`` is called at its end. ``why_not`` is given the package's file and may give a reason to
    import plainly.
    """

    def __init__(
        self,
        package: str,
        packages: Sequence[str],
        *,
        eager: frozenset[str] = frozenset(),
        whole: frozenset[str] = frozenset(),
        alone: Sequence[str] = (),
        nowhere: frozenset[str] = frozenset(),
        before: Mapping[str, Sequence[str]] | None = None,
        after: Mapping[str, Callable[[], None]] | None = None,
        stand_ins: Mapping[str, Mapping[str, Any]] | None = None,
        lasting: Mapping[str, Mapping[str, Any]] | None = None,
        open: Sequence[str] = (),
        why_not: Callable[[Path], str | None] = lambda _: None,
        importing: Callable[[], AbstractContextManager[object]] = nullcontext,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._package = package
        self._packages = tuple(packages)
        self._eager = eager
        self._whole = whole
        self._alone = tuple(alone)
        self.nowhere = nowhere
        self._before = before or {}
        self._after = after or {}
        self._stand_ins = stand_ins or {}
        self._lasting = lasting or {}
        self._open = open
        self._why_not = why_not
        self._importing = importing
        self._around = around
        self._on_complete = on_complete
        self._names: list[str] = []
        self._began = False
        self._one_by_one = True

    @property
    def ready(self) -> bool:
        """Neither importing nor completing."""
        return not self._one_by_one

    def install(self) -> None:
        """Before ``package`` is imported."""
        sys.meta_path.insert(0, self)

    def run(self, module: ModuleType) -> None:
        """Execute the package, importing nothing of the others but names."""
        with _lock.held(), self._importing():
            self._began = True
            module.__loader__.exec_module(module)  # type: ignore[union-attr]
            module.__class__ = DeferredModule
            names_of(module)[_STATE] = _Deferral(self, module.__loader__, executed=True)
            self._names.append(module.__name__)
            self._take_stand_ins_back()
            self._one_by_one = False

    def _take_stand_ins_back(self) -> None:
        """From where others than this package's functions would find them, and take them for what they stand for."""
        for name, names in self._stand_ins.items():
            for key in names if name in sys.modules else ():
                names_of(sys.modules[name]).pop(key, None)
        for name in self._open:
            names = names_of(sys.modules[name])
            names[_STATE].late = {key: value for key, value in names.items() if type(value) is StandIn}
            for key in names[_STATE].late:
                del names[key]

    def must_complete(self, name: str) -> bool:
        """Whether a question that the module ``name`` cannot answer is one for all modules."""
        if self._one_by_one or name.partition(".")[0] in self._whole:
            return False
        return not any(name == alone or name.startswith(alone + ".") for alone in self._alone)

    def complete(self) -> None:
        """Execute all that is pending. Idempotent."""
        with _lock.held():
            if self not in sys.meta_path or self._one_by_one:
                return
            limit = sys.getrecursionlimit()
            sys.setrecursionlimit(limit + _FRAMES)  # who asks may have used its own up; half of it done is no torch
            try:
                self._execute_pending()
            finally:
                sys.setrecursionlimit(limit)

    def _execute_pending(self) -> None:
        self._one_by_one = True
        with self._around():
            while pending := list(self.pending()):
                for module in pending:
                    execute(module)
            sys.meta_path.remove(self)
            for name in self._open:
                names = names_of(sys.modules[name])
                for key, value in names[_STATE].late.items():
                    names.setdefault(key, value.real())
            for name in self._names:
                self._make_ordinary(sys.modules.get(name))
            self._on_complete()

    def pending(self) -> Iterator[ModuleType]:
        """The modules that still wait, in the order of their first import."""
        for name in self._names:
            module = sys.modules.get(name)
            deferral: _Deferral | None = names_of(module).get(_STATE) if module is not None else None
            if module is not None and deferral is not None and not (deferral.executed or deferral.running):
                yield module

    @staticmethod
    def _make_ordinary(module: ModuleType | None) -> None:
        if type(module) is DeferredModule:
            del names_of(module)[_STATE]
            object.__setattr__(module, "__class__", ModuleType)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._began:
            return self._root_spec(name, path, target)
        spec = self._real_spec(name, path, target) if name.partition(".")[0] in self._packages else None
        if spec is not None and target is None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Undecided(self, spec.loader)
        return spec

    def create(self, spec: ModuleSpec, real: Any) -> ModuleType | None:
        """The module of ``spec``, whose loader becomes ``real``, or one that defers what that does."""
        package, _, below = spec.name.partition(".")
        with _lock.held():  # another thread that completes does so first, and undisturbed
            if self not in sys.meta_path or spec.name in self._eager or (self.ready and self.must_complete(spec.name)):
                self.complete()  # what a plain import has executed before; else this may be the wrong end of a cycle
            elif below and package in self._whole:
                execute(sys.modules[package])
            else:
                parent = spec.name.rpartition(".")[0]
                before = self._before.get(spec.name, (parent,) if parent else ())
                names = {
                    **({} if self.ready else self._stand_ins.get(spec.name, {})),
                    **self._lasting.get(spec.name, {}),
                }
                spec.loader = _Deferral(self, real, before, self._after.get(spec.name), names)
                self._names.append(spec.name)
                return DeferredModule(spec.name)
            module = sys.modules.get(spec.name)
            spec.loader = real if module is None else _Loaded(module.__spec__)
            return module

    def _root_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        if name != self._package:
            return None
        spec = self._real_spec(name, path, target)
        if spec is None or spec.origin is None:
            return None  # the import that follows says it better
        if reason := self._why_not(Path(spec.origin)):
            logger.info("importing %s plainly: %s", name, reason)
            sys.meta_path.remove(self)
        else:
            spec.loader = _Root(self, spec.loader)
        return spec

    def _real_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None
