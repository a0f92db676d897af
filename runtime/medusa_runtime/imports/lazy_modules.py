"""Lazy modules: they are imported now, and executed when something looks up a name in them.

``importlib.util.LazyLoader`` executes a module at any access, even when a second import statement looks at its
``__spec__``. Here, a module is executed when a name is looked up that it does not have yet, when its names are listed,
and before a name is set in it. While its package is imported, it may hold *stand-ins*: objects in place of a few names
that importers bind early and use late, or never.

A package with import cycles can only be executed in the order of its imports. While the package is being imported, a
lookup executes one module. Afterwards, the first lookup that fails executes all pending modules, in the order of their
imports, unless the module is known to be ``independent``.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from .lock import ImportLock

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # importlib.abc takes 5 ms: it imports shutil and tempfile for the readers of resources

    class MetaPathFinder: ...

    class Loader:
        def create_module(self, spec):
            return None


logger = logging.getLogger(__name__)
_STATE = "__medusa_lazy__"
_FRAMES = 1000  # Python's default recursion limit, so that there is as much room as at the start of a program
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_MEANINGFUL_DUNDERS = {"__all__", "__version__"}
_lock = ImportLock()  # one for all modules: executing one executes others, in any order
# A module's namespace as it is: ``vars`` would execute a lazy module first.
namespace_of: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__


class LazyModule(ModuleType):
    """A module that is executed when a missing name is looked up. Once its ``LazyFinder`` completes, it is ordinary."""

    def __getattr__(self, name: str) -> Any:
        names = namespace_of(self)
        lazy: _LazyLoader | None = names.get(_STATE)
        counts = not name.startswith("__") or name in _MEANINGFUL_DUNDERS
        if counts and not (lazy and f"{self.__name__}.{name}" in lazy.finder.policy.absent):
            execute_for_names(self)
            if name in names:
                return names[name]
            if lazy is not None and name in lazy.late:
                return names.setdefault(name, lazy.late[name].real())
            fallback = names.get("__getattr__")
            if fallback is not None:
                return fallback(name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # Execute first: a later execution would undo what is set now. Only an import, which sets a child, need not.
        by_user = not name.startswith("__") and not isinstance(value, ModuleType)
        if by_user and _is_incomplete(self) and not namespace_of(self)[_STATE].executed:
            execute_for_names(self)
        ModuleType.__setattr__(self, name, value)  # not super(): by now, this may be an ordinary module

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # dir() uses it, too
        if _is_incomplete(self):
            execute_for_names(self)
        return namespace_of(self)


def _is_incomplete(module: ModuleType) -> bool:
    lazy: _LazyLoader | None = namespace_of(module).get(_STATE)
    if lazy is None or lazy.running or not lazy.finder.ready:
        return False
    return bool(lazy.late or not lazy.executed)


def execute_for_names(module: ModuleType) -> None:
    """Execute ``module`` for names that it does not have, and all other pending modules if it may need them."""
    with _lock.held():
        lazy: _LazyLoader | None = namespace_of(module).get(_STATE)
        if lazy is None or lazy.running:
            return
        if lazy.finder.must_complete(module.__name__):
            logger.info("executing all lazy modules: a name that %s does not have was looked up", module.__name__)
            lazy.finder.complete()
        else:
            execute(module)


def execute(module: ModuleType) -> None:
    """Run a lazy module's code, unless it has run or is running further up this thread's stack."""
    with _lock.held():
        lazy: _LazyLoader | None = namespace_of(module).get(_STATE)
        if lazy is None or lazy.running or lazy.executed:
            return
        for name in lazy.prerequisites:
            execute(importlib.import_module(name))
        if lazy.running or lazy.executed:  # meanwhile, by one of those
            return
        lazy.running = True
        try:
            lazy.loader.exec_module(module)
            lazy.executed = True
            if lazy.on_executed is not None:
                lazy.on_executed()
        finally:
            lazy.running = False


class StandIn:
    """An object that importers bind in place of the real one, which is looked up at each use."""

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
        """Return the stand-in for ``name`` in ``module``, which is executed at the first use."""

        def resolve() -> Any:
            owner = importlib.import_module(module)
            execute_for_names(owner)  # this replaces the stand-in in its own module
            return getattr(owner, name)

        return cls(resolve)

    def real(self) -> Any:
        """Return the real object."""
        return self._resolve()


class _LazyLoader(Loader):
    """The loader of one lazy module, and its state."""

    def __init__(
        self,
        finder: LazyFinder,
        loader: Any,
        prerequisites: Sequence[str] = (),
        on_executed: Callable[[], None] | None = None,
        names: Mapping[str, Any] = _NOTHING,
        *,
        executed: bool = False,
    ) -> None:
        self.finder = finder
        self.loader = loader
        self.prerequisites = prerequisites
        self.on_executed = on_executed
        self.names = names
        self.late: dict[str, StandIn] = {}  # the module's stand-ins, once they are hidden from other code
        self.running = False
        self.executed = executed

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self.loader
        namespace_of(module).update(self.names)
        namespace_of(module)[_STATE] = self


class _Root(Loader):
    """The loader of the package itself, whose own code is executed at once."""

    def __init__(self, finder: LazyFinder, loader: Any) -> None:
        self.finder = finder
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self.loader
        self.finder.run(module)


class _Undecided(Loader):
    """Lets the finder decide how to load a module when it is created, and not in ``find_spec``.

    The decision may wait for threads that need the lock that is held in ``find_spec``.
    """

    def __init__(self, finder: LazyFinder, loader: Any) -> None:
        self.finder = finder
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.finder.create(spec, self.loader)

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError("decided when the module was created")


class _Loaded(Loader):
    """The loader of a module that something else has imported while its own import was under way."""

    def __init__(self, spec: ModuleSpec | None) -> None:
        self.spec = spec

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class LazyPolicy(NamedTuple):
    """Which modules are lazy, and which are executed for a lookup.

    packages: packages whose modules are lazy, except those in ``eager``; or the full names of single modules.
    whole: packages whose children are not lazy. The first child that is imported executes the package.
    independent: modules that can be executed, with all modules below them, without the other pending ones.
    absent: names (``module.name``) that code looks up although they never exist; such a lookup executes nothing.
    prerequisites: for some modules, the modules to execute first, instead of their parent.
    on_executed: for some modules, a function to call when they have been executed.
    """

    packages: tuple[str, ...]
    eager: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    independent: tuple[str, ...] = ()
    absent: frozenset[str] = frozenset()
    prerequisites: Mapping[str, Sequence[str]] = _NOTHING
    on_executed: Mapping[str, Callable[[], None]] = _NOTHING


class StandIns(NamedTuple):
    """Names that lazy modules have before they are executed, by module.

    importing: names that exist only while the package is imported.
    lasting: names that exist until the module is executed.
    bound_by: modules that the import executes and that bind stand-ins. These are taken back at its end.
    """

    importing: Mapping[str, Mapping[str, Any]] = _NOTHING
    lasting: Mapping[str, Mapping[str, Any]] = _NOTHING
    bound_by: tuple[str, ...] = ()


class LazyHooks(NamedTuple):
    """Functions that a ``LazyFinder`` calls.

    why_not: given the package's file, returns a reason to import the package plainly, or None.
    importing: returns the context in which the package is imported.
    completing: returns the context in which all pending modules are executed.
    on_complete: is called at the end of that context.
    """

    why_not: Callable[[Path], str | None] = lambda _: None
    importing: Callable[[], AbstractContextManager[object]] = nullcontext
    completing: Callable[[], AbstractContextManager[object]] = nullcontext
    on_complete: Callable[[], None] = lambda: None


_NO_STAND_INS, _NO_HOOKS = StandIns(), LazyHooks()


class LazyFinder(MetaPathFinder):
    """A finder that makes the next import of ``package`` lazy, as the policy says, once it is installed."""

    def __init__(
        self,
        package: str,
        policy: LazyPolicy,
        stand_ins: StandIns = _NO_STAND_INS,
        hooks: LazyHooks = _NO_HOOKS,
    ) -> None:
        self.policy = policy
        self._package = package
        self._stand_ins = stand_ins
        self._hooks = hooks
        self._names: list[str] = []  # the names of the lazy modules, in the order of their first import
        self._began = False
        self._busy = True  # while the package is imported or completed, when modules are executed one by one

    @property
    def ready(self) -> bool:
        """Whether the package has been imported, and is not being completed right now."""
        return not self._busy

    def install(self) -> None:
        """Put this finder in front of all others. Call it before the package is imported."""
        sys.meta_path.insert(0, self)

    def run(self, module: ModuleType) -> None:
        """Execute the package itself. The modules that it imports are lazy."""
        with _lock.held(), self._hooks.importing():
            self._began = True
            module.__loader__.exec_module(module)  # type: ignore[union-attr]
            module.__class__ = LazyModule
            namespace_of(module)[_STATE] = _LazyLoader(self, module.__loader__, executed=True)
            self._names.append(module.__name__)
            self._take_stand_ins_back()
            self._busy = False

    def _take_stand_ins_back(self) -> None:
        """Remove stand-ins where code outside the package would take them for the real objects."""
        for name, names in self._stand_ins.importing.items():
            for key in names if name in sys.modules else ():
                namespace_of(sys.modules[name]).pop(key, None)
        for name in self._stand_ins.bound_by:
            names = namespace_of(sys.modules[name])
            names[_STATE].late = {key: value for key, value in names.items() if type(value) is StandIn}
            for key in names[_STATE].late:
                del names[key]

    def must_complete(self, name: str) -> bool:
        """Return whether a failed lookup in the module ``name`` executes all pending modules."""
        if self._busy or name.partition(".")[0] in self.policy.whole:
            return False
        return not any(name == one or name.startswith(one + ".") for one in self.policy.independent)

    def complete(self) -> None:
        """Execute all pending modules. Idempotent."""
        with _lock.held():
            if self not in sys.meta_path or self._busy:
                return
            limit = sys.getrecursionlimit()
            sys.setrecursionlimit(limit + _FRAMES)  # the caller may be deep, and an import must not fail half-way
            try:
                self._execute_pending()
            finally:
                sys.setrecursionlimit(limit)

    def _execute_pending(self) -> None:
        self._busy = True
        with self._hooks.completing():
            while pending := list(self.pending()):
                for module in pending:
                    execute(module)
            sys.meta_path.remove(self)
            for name in self._stand_ins.bound_by:
                names = namespace_of(sys.modules[name])
                for key, value in names[_STATE].late.items():
                    names.setdefault(key, value.real())
            for name in self._names:
                self._make_ordinary(sys.modules.get(name))
            self._hooks.on_complete()

    def pending(self) -> Iterator[ModuleType]:
        """Yield the modules that have not been executed, in the order of their first import."""
        for name in self._names:
            module = sys.modules.get(name)
            lazy: _LazyLoader | None = namespace_of(module).get(_STATE) if module is not None else None
            if module is not None and lazy is not None and not (lazy.executed or lazy.running):
                yield module

    @staticmethod
    def _make_ordinary(module: ModuleType | None) -> None:
        if type(module) is LazyModule:
            del namespace_of(module)[_STATE]
            object.__setattr__(module, "__class__", ModuleType)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._began:
            return self._root_spec(name, path, target)
        known = name.partition(".")[0] in self.policy.packages or name in self.policy.packages
        spec = self._real_spec(name, path, target) if known else None
        if spec is not None and target is None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Undecided(self, spec.loader)
        return spec

    def create(self, spec: ModuleSpec, real: Any) -> ModuleType | None:
        """Create the module of ``spec``: a lazy one, or one that its ``real`` loader executes at once (None)."""
        package, _, below = spec.name.partition(".")
        with _lock.held():  # if another thread is completing the package, wait for that
            if (
                self not in sys.meta_path
                or spec.name in self.policy.eager
                or (self.ready and self.must_complete(spec.name))
            ):
                self.complete()  # as a plain import has; otherwise this could enter a cycle at the wrong module
            elif below and package in self.policy.whole:
                execute(sys.modules[package])
            else:
                parent = spec.name.rpartition(".")[0]
                first = self.policy.prerequisites.get(spec.name, (parent,) if parent else ())
                names = {
                    **({} if self.ready else self._stand_ins.importing.get(spec.name, {})),
                    **self._stand_ins.lasting.get(spec.name, {}),
                }
                spec.loader = _LazyLoader(self, real, first, self.policy.on_executed.get(spec.name), names)
                self._names.append(spec.name)
                return LazyModule(spec.name)
            module = sys.modules.get(spec.name)
            spec.loader = real if module is None else _Loaded(module.__spec__)
            return module

    def _root_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        if name != self._package:
            return None
        spec = self._real_spec(name, path, target)
        if spec is None or spec.origin is None:
            return None  # the plain import that follows raises a better error
        if reason := self._hooks.why_not(Path(spec.origin)):
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
