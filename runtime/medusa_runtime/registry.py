"""The engines that ``--engine`` can name. Each package with an engine registers it here.

Importing ``medusa_runtime`` registers the torch engine, and importing ``medusa_vllm`` registers vLLM's. An engine's
parts are named as ``module:function`` and imported only when they are called, so registering imports nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import ConfigError

NO_ENGINE = "none"  # the handler builds its own module


class EngineKind(NamedTuple):
    """One value of ``--engine``, and where its parts are.

    Parts that are code are named as ``module:function``; the signature below is the function's.

    open: ``(region, settings, timeline) -> Engine``.
    preimport: ``(settings, region | None) -> None``. Imports what ``open`` will need. It runs in a process that only
        forks, so it must not touch a device. ``region`` is None in a process that waits for its model.
    distributions: names of Python packages. The version of the first one that is installed is part of the state key.
    artifacts: the kinds of artifacts that a start uses, beside the weight index.
    bundles_of: the engine whose artifacts this one uses, because it computes the same; by default its own.
    profile: ``(region, settings) -> (order, KV plan)``. It runs in the process that materializes.
    captures: for each kind of artifact, ``(model, settings, folder) -> Path | None``. Other files that it leaves in the
        folder become artifacts, too, if they are named after a kind.
    graph_capture: the name of a module that captures CUDA graphs. It runs as a process.
    owns_gpu_context: whether the engine process creates the GPU's context itself, before it imports.
    compiles_on_cpu: whether a bundle's compiled code is of use without a GPU.
    warmed_as: the engine whose idle processes on a node can become this one, by importing the rest of what it needs.
    fetch: ``(region, settings, timeline) -> None``, for an engine whose weights are elsewhere. Fills the region with
        the checkpoint's small files, in place of the prefetcher. ``--model`` is then a name instead of a checkpoint.
    http: ``(settings) -> bool``, for an engine with an HTTP server of its own (``open_http``), which gets the requests
        that our routes do not cover. Returns whether our routes may answer those that they do. Raises ConfigError.
    in_groups: whether only a cluster starts it, as a worker of a group, so that users are not offered it.
    check: ``(read, index, settings) -> None``. Raises what a start would raise for a checkpoint with this weight index
        and the small files that ``read`` returns, as far as these show it.
    adapters: ``(settings) -> dict[str, str]``. Returns the URLs of the adapters in the settings, by the names that
        requests use for them. Raises ConfigError or ValueError.
    """

    name: str
    open: str
    preimport: str
    distributions: tuple[str, ...]
    artifacts: tuple[str, ...] = ()
    bundles_of: str = ""
    profile: str = ""
    captures: Mapping[str, str] = {}
    graph_capture: str = ""
    owns_gpu_context: bool = False
    compiles_on_cpu: bool = False
    warmed_as: str = ""
    fetch: str = ""
    http: str = ""
    in_groups: bool = False
    check: str = ""
    adapters: str = ""


_KINDS: dict[str, EngineKind] = {}


def register(kind: EngineKind) -> None:
    """Make an engine known to ``--engine``. Registering a name again replaces the engine."""
    _KINDS[kind.name] = kind


def engine_names() -> tuple[str, ...]:
    """Return the names of the registered engines, in the order of their registration."""
    return tuple(_KINDS)


def offered_engines() -> tuple[str, ...]:
    """Return the names of the engines that a user may choose."""
    return tuple(kind.name for kind in _KINDS.values() if not kind.in_groups)


def engine_kind(name: str) -> EngineKind:
    """Return the engine of this name. Raises ConfigError, which lists the registered names, for an unknown one."""
    if name not in _KINDS:
        raise ConfigError(f"expected one of the engines {', '.join(_KINDS)}, found {name!r}")
    return _KINDS[name]


def bundle_engine(name: str) -> str:
    """Return the name of the engine whose artifacts an engine uses. Raises ConfigError for an unknown name."""
    return name if name == NO_ENGINE else engine_kind(name).bundles_of or name


def is_remote(name: str) -> bool:
    """Return whether the weights of this engine are elsewhere, so that none are fetched."""
    return name in _KINDS and bool(_KINDS[name].fetch)


def engines_using(artifact: str) -> tuple[str, ...]:
    """Return the names of the registered engines whose starts use this kind of artifact."""
    return tuple(kind.name for kind in _KINDS.values() if artifact in kind.artifacts)


def imported(target: str) -> Callable[..., Any]:
    """Import and return what ``module:name`` refers to. Raises ImportError or AttributeError."""
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


__all__ = [
    "NO_ENGINE", "EngineKind", "bundle_engine", "engine_kind", "engine_names", "engines_using", "imported", "is_remote",
    "offered_engines", "register",
]  # fmt: skip
