"""The engines that ``--engine`` can name. Each package with an engine registers it here.

Importing ``medusa_runtime`` registers the torch engine, importing ``medusa_vllm`` vLLM's. An engine's parts are named
as ``module:function`` and imported when they are called, so registering imports nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import ConfigError

NO_ENGINE = "none"  # the handler builds its own module


class EngineKind(NamedTuple):
    """One value of ``--engine``, and where its parts are.

    open: ``(region, settings, timeline) -> Engine``.
    preimport: ``(settings, region | None) -> None``; imports what ``open`` will need, in a process that will only fork,
        so it touches no device. ``region`` is None in a process that waits for its model.
    distributions: the version of the first one that is installed decides whether a state bundle still fits.
    artifacts: the kinds of artifacts that its start uses, beside the weight index.
    profile: ``(region, settings) -> (order, KV plan)``, run in the process that materializes.
    captures: for a kind of artifact, ``(model, settings, folder) -> Path | None``. Other files that it leaves in the
        folder become artifacts, too, if they are named after a kind.
    graph_capture: a module that captures CUDA graphs, run as a process.
    owns_gpu_context: the engine process creates the GPU's context itself, before it imports.
    compiles_on_cpu: a bundle's compiled code is of use without a GPU.
    warmed_as: the engine whose idle processes on a node can become this one; they import what it needs besides.
    fetch: ``(region, settings, timeline) -> None``, for an engine that has its weights elsewhere; fills the region with
        the checkpoint's small files, in place of the prefetcher. ``--model`` is then no checkpoint but a name.
    http: ``(settings) -> bool``, for an engine with an HTTP server of its own (``open_http``), which gets the requests
        that our routes do not cover. True where our routes may answer what they cover. Raises ConfigError.
    adapters: ``(settings) -> dict[str, str]``, the URLs of the adapters that the settings name, by the names that
        requests give. Raises ConfigError or ValueError.
    """

    name: str
    open: str
    preimport: str
    distributions: tuple[str, ...]
    artifacts: tuple[str, ...] = ()
    profile: str = ""
    captures: Mapping[str, str] = {}
    graph_capture: str = ""
    owns_gpu_context: bool = False
    compiles_on_cpu: bool = False
    warmed_as: str = ""
    fetch: str = ""
    http: str = ""
    adapters: str = ""


_KINDS: dict[str, EngineKind] = {}


def register(kind: EngineKind) -> None:
    """Make ``--engine kind.name`` known. Registering a name again replaces the engine."""
    _KINDS[kind.name] = kind


def engine_names() -> tuple[str, ...]:
    """The names of the registered engines, in the order of their registration."""
    return tuple(_KINDS)


def engine_kind(name: str) -> EngineKind:
    """The engine of this name. Raises ConfigError, which lists the registered ones, for another name."""
    if name not in _KINDS:
        raise ConfigError(f"expected one of the engines {', '.join(_KINDS)}, found {name!r}")
    return _KINDS[name]


def is_remote(name: str) -> bool:
    """Return whether the weights of this engine are elsewhere, so that none are fetched."""
    return name in _KINDS and bool(_KINDS[name].fetch)


def engines_using(artifact: str) -> tuple[str, ...]:
    """The registered engines whose starts use this kind of artifact."""
    return tuple(kind.name for kind in _KINDS.values() if artifact in kind.artifacts)


def imported(target: str) -> Callable[..., Any]:
    """Import what ``module:name`` names. Raises ImportError and AttributeError."""
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


__all__ = [
    "NO_ENGINE", "EngineKind", "engine_kind", "engine_names", "engines_using", "imported", "is_remote", "register",
]  # fmt: skip
