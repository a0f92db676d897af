"""Imports vLLM without what only its HTTP server and its compiler need, which saves about a quarter of the time.

Nothing of vLLM is changed: it works without Inductor if that cannot be imported. Modules that parse tool calls and
reasoning import an OpenAI client, FastAPI and MCP. Their classes are empty here, because our engine returns only
tokens.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from tempfile import gettempdir
from types import ModuleType

logger = logging.getLogger(__name__)

_CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# Modules that are replaced, and their classes. Other modules import these, but use them only to parse text.
_NEVER_USED: dict[str, tuple[str, ...]] = {
    "vllm.entrypoints.mcp": (),
    "vllm.entrypoints.mcp.tool_server": ("ToolServer",),
    "vllm.parser": (),
    "vllm.parser.engine": (),
    "vllm.parser.engine.adapters": ("ParserEngineReasoningAdapter", "ParserEngineToolAdapter"),
}
_INDUCTOR = "torch._inductor.lowering"
_NO_DYNAMO = "TORCHDYNAMO_DISABLE"


@contextmanager
def lean_imports() -> Iterator[None]:
    """Make ``import vllm`` lean in this context, for an engine that will not compile."""
    finder = _Placeholders()
    sys.meta_path.insert(0, finder)
    blocked = _INDUCTOR not in sys.modules
    if blocked:
        vars(sys)["modules"][_INDUCTOR] = None  # makes its import fail
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if blocked:
            sys.modules.pop(_INDUCTOR, None)


def import_those_there(modules: Sequence[str]) -> None:
    """Import modules, without those that this version or installation lacks, or that fail. Their users say so."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - a module may raise anything when it is imported
            logger.debug("%s is not imported beforehand: %s: %s", module, type(error).__name__, error)


@contextmanager
def without_torch_compile() -> Iterator[None]:
    """Make ``@torch.compile`` leave functions as they are in this context. Models can still be compiled later.

    vLLM decorates small functions with it, which would be compiled at their first use, even in an eager engine. The
    first request with logprobs would take seconds.
    """
    disabled = os.environ.get(_NO_DYNAMO)
    os.environ[_NO_DYNAMO] = "1"
    try:
        yield
    finally:
        if disabled is None:
            del os.environ[_NO_DYNAMO]
        else:
            os.environ[_NO_DYNAMO] = disabled


@contextmanager
def avoid_cache_folder() -> Iterator[None]:
    """Name an existing folder as torch's cache of compiled code in this context.

    Importing torch's compiler, or letting it wrap a function, would make one.
    """
    given = _CACHE_FOLDER in os.environ
    os.environ.setdefault(_CACHE_FOLDER, gettempdir())
    try:
        yield
    finally:
        if not given:
            os.environ.pop(_CACHE_FOLDER, None)


def import_real_modules() -> None:
    """Replace the empty classes by vLLM's own, for vLLM's HTTP server, which needs them."""
    placeholders: dict[str, ModuleType] = {
        name: module
        for name in _NEVER_USED
        if (module := sys.modules.get(name)) is not None
        and isinstance(getattr(module.__spec__, "loader", None), _Placeholders)
    }
    if not placeholders:
        return
    empty = {vars(module)[name]: (place, name) for place, module in placeholders.items() for name in _NEVER_USED[place]}
    for name, module in placeholders.items():
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if vars(sys.modules.get(parent, sys)).get(child) is module:
            delattr(sys.modules[parent], child)
    for name in placeholders:
        importlib.import_module(name)
    names = {name for _, name in empty.values()}
    for module in [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]:
        for name in names:
            found = vars(module).get(name)
            if isinstance(found, type) and found in empty:
                place, _ = empty[found]
                setattr(module, name, getattr(sys.modules[place], name))


class _Placeholders(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _NEVER_USED:
            return None
        return ModuleSpec(name, self, is_package=any(other.startswith(name + ".") for other in _NEVER_USED))

    def exec_module(self, module: ModuleType) -> None:
        for name in _NEVER_USED[module.__name__]:
            setattr(module, name, type(name, (), {"__module__": module.__name__}))


__all__ = [
    "avoid_cache_folder",
    "import_real_modules",
    "import_those_there",
    "lean_imports",
    "without_torch_compile",
]
