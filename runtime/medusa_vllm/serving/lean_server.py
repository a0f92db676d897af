"""The lean import of vLLM's HTTP server, which halves the CPU time of a request that waits for it.

vLLM uses a few classes of OpenAI's client, but importing them imports the whole client and 500 modules of types. Here,
a package of types imports only the names that are looked up. Also, pydantic builds the validators of each class, and of
FastAPI's routes, when it is defined. Here it builds them at their first use, because an instance uses few of them.
"""

from __future__ import annotations

import ast
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_CLIENT = "openai"
_TYPES = "openai.types"


@contextmanager
def lean_server() -> Iterator[None]:
    """Make the import of vLLM's server lean in this context. Other code gets the real modules and classes."""
    if _CLIENT not in sys.modules or _PACKAGES.found_client:
        sys.meta_path.insert(0, _PACKAGES)
    try:
        with _defer_validators():
            yield
    finally:
        if _PACKAGES in sys.meta_path:
            sys.meta_path.remove(_PACKAGES)


@contextmanager
def _defer_validators() -> Iterator[None]:
    """Give classes and adapters that are made in this context pydantic's option ``defer_build``."""
    try:
        from pydantic import TypeAdapter
        from pydantic._internal import _config

        options_of_a_class: Any = _config.ConfigWrapper
        adapter: Any = TypeAdapter
        before, defers = vars(options_of_a_class)["for_model"], vars(adapter)["_defer_build"]

        def for_model(cls: Any, *arguments: Any, **options: Any) -> Any:
            made = before.__func__(cls, *arguments, **options)
            made.config_dict.setdefault("defer_build", True)
            return made

    except (ImportError, AttributeError, KeyError) as error:
        logger.info("importing vLLM's server without deferred validators: %s", error)
        yield
        return
    options_of_a_class.for_model, adapter._defer_build = classmethod(for_model), property(lambda self: True)
    try:
        yield
    finally:
        options_of_a_class.for_model, adapter._defer_build = before, defers


class _LazyPackages(MetaPathFinder):
    """Finds OpenAI's package and its packages of types, whose code runs when it is needed, or never."""

    found_client = False  # the package itself

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (_CLIENT, _TYPES) and not name.startswith(_TYPES + "."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.submodule_search_locations is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = _LazyLoader(spec.loader)
        self.found_client |= name == _CLIENT
        return spec


_PACKAGES = _LazyPackages()


class _LazyLoader(Loader):
    """Gives a package a ``__getattr__`` instead of running its ``__init__.py``, which runs only if a name needs it."""

    def __init__(self, real: SourceFileLoader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        package, real = module.__name__, self._real
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = real
        places = {} if package == _CLIENT else _places(real.get_source(package) or "")

        def look_up(name: str) -> Any:
            if name.startswith("__") and name not in ("__all__", "__version__"):
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            if name in places:
                place, theirs = places[name]
                found = getattr(importlib.import_module(place, package), theirs)
                setattr(module, name, found)
                return found
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError:
                vars(module).pop("__getattr__", None)
                real.exec_module(module)
                return getattr(module, name)

        vars(module)["__getattr__"] = look_up


def _places(source: str) -> dict[str, tuple[str, str]]:
    """Return the module from which a package imports each of its names, and the name that it has there.

    It is empty if the package does more than import names.
    """
    found = {}
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.ImportFrom):
            return {}
        if statement.level:
            place = "." * statement.level + (statement.module or "")
            found.update({one.asname or one.name: (place, one.name) for one in statement.names})
    return found


__all__ = ["lean_server"]
