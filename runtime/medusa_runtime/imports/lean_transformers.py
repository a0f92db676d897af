"""The lean import of transformers: a model's module, without the parts for downloads, training and other modalities.

``import transformers`` scans its folders, and a model's module imports many things that no forward pass runs, such as
torch's compiler and distributed tensors, SciPy, and a client of the hub. Here the package itself is not executed, and
placeholders replace modules whose names are only bound at import. The lists were found by experiment. They hold for the
versions in ``TESTED``; any other version is imported plainly.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
import threading
import typing
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .lazy_modules import namespace_of
from .lazy_torch import is_lean

logger = logging.getLogger(__name__)

TESTED = ("5.23.", "5.24.")
_NAME = "transformers"
_GENERATION = "transformers.generation"


def _identity(*args: Any, **_: Any) -> Any:
    """Stand in for a decorator, with or without arguments."""
    return args[0] if args and callable(args[0]) else lambda decorated: decorated


def _never(*_: Any, **__: Any) -> bool:
    return False


def _check(cond: Any, msg: Any, error_type: type[Exception] = ValueError) -> None:
    """Stand in for ``torch_compilable_check``, which raises an error, and tells it torch's compiler."""
    found = cond() if callable(cond) else cond
    if not bool(found.all() if hasattr(found, "all") else found):
        raise error_type(msg() if callable(msg) else msg)


class GenerationMixin:
    """Stands in for transformers' class, whose generation loop is not used. Its name shows that a model generates."""


class _GenerationConfig:
    """Stands in for GenerationConfig, with whose defaults a model's config is compared."""

    @classmethod
    def from_model_config(cls, _: Any) -> None:
        """Return None, because requests say how tokens are chosen."""

    @staticmethod
    def _get_default_generation_params() -> dict[str, Any]:
        return {}


class _NotDistributed:
    """Stands in for DistributedMixin."""

    def init_parallel_plans(self) -> None:
        """Do nothing: there are no such plans."""


class _NoHub:
    """Stands in for PushToHubMixin, whose method other classes copy."""

    def push_to_hub(self) -> None:
        """Do nothing."""


# Packages that are not executed themselves; modules inside them are.
_BARE = frozenset({_NAME, "transformers.models"})


# Modules that are replaced, together with all below them, and the names in them that are used.
class _AutoModel:
    """transformers' class that finds a decoder's class by its configuration. Its classifiers construct decoders so."""

    @staticmethod
    def from_config(config: Any) -> Any:
        kind = type(config)
        module = sys.modules[kind.__module__.replace("configuration_", "modeling_")]
        return getattr(module, kind.__name__.removesuffix("Config") + "Model")(config)


_PLACEHOLDERS: dict[str, dict[str, Any]] = {
    "transformers.data": {},
    "transformers.dependency_versions_check": {},
    "transformers.distributed": {
        "DistributedMixin": _NotDistributed,
        "is_dtensor": _never,
        "is_local_dist_rank_0": lambda: True,
    },
    "transformers.distributed.fsdp": {"is_fsdp_managed_module": _never},
    "transformers.distributed.utils": {"_get_torch_distributed_world_size": lambda: 1},
    "transformers.dynamic_module_utils": {},
    _GENERATION: {"GenerationConfig": _GenerationConfig, "GenerationMixin": GenerationMixin},
    "transformers.generation.continuous_batching": {},
    "transformers.integrations.accelerate": {"force_accelerate_hooks": _identity},
    "transformers.integrations.deepgemm": {},
    "transformers.integrations.deepspeed": {"is_deepspeed_zero3_enabled": _never},
    "transformers.integrations.eager_paged": {},
    "transformers.integrations.finegrained_fp8": {"ALL_FP8_EXPERTS_FUNCTIONS": {}},
    "transformers.integrations.flash_attention": {},
    "transformers.integrations.flex_attention": {},
    "transformers.integrations.fsdp": {"is_fsdp_enabled": _never, "is_fsdp_managed_module": _never},
    "transformers.integrations.peft": {},
    "transformers.integrations.sonicmoe": {},
    "transformers.integrations.tensor_parallel": {},
    "transformers.loss": {"LOSS_MAPPING": {}},
    "transformers.models.auto": {"AutoModel": _AutoModel},
    "transformers.processing_utils": {"Unpack": getattr(typing, "Unpack", None)},
    "transformers.quantizers": {},
    "transformers.safetensors_conversion": {},
    "transformers.utils.auto_docstring": {"auto_docstring": _identity, "auto_class_docstring": _identity},
    "transformers.utils.chat_template_utils": {},
    "transformers.utils.hub": {"PushToHubMixin": _NoHub},
    "transformers.utils.loading_report": {},
    "transformers.utils.notebook": {},
    "transformers.utils.peft_utils": {},
    "httpx2": {},
    "huggingface_hub": {"is_offline_mode": lambda: True},
    "huggingface_hub.utils": {"are_progress_bars_disabled": lambda: True},
    "tqdm": {},
    "torch.autograd.graph": {},
    "torch.distributions": {},
    "torch._dynamo._trace_wrapped_higher_order_op": {"TransformGetItemToIndex": contextlib.nullcontext},
    "torch.nn.attention.flex_attention": {},
    "torch.utils.checkpoint": {},
}

# Functions that are called at import to register something for a compiler, or for a fast path of experts.
_REGISTERING = {
    "torch.compiler": ("allow_in_graph", "disable"),
    "torch.library": ("custom_op", "register_autograd", "register_fake"),
}
# Placeholders below which modules are real, unless they are replaced themselves.
_REAL_BELOW = frozenset({"huggingface_hub"})

_lock = threading.RLock()
_importing = False


def import_from_transformers(module: str, *, generation: bool = False, whole: bool = False) -> ModuleType:
    """Import a module of transformers: leanly, if torch was imported leanly and this version was tested.

    With ``generation``, models have transformers' own ``generate``. With ``whole``, or once an import was plain or a
    lean one has failed, all imports of this process are plain. Raises ImportError.
    """
    with _lock:
        if whole and not _is_plain():
            forget()
        if generation and _GENERATION in _PLACEHOLDERS:
            del _PLACEHOLDERS[_GENERATION]
            if not _is_plain():
                _drop()
        if _is_plain() or not (
            isinstance(sys.modules.get(_NAME), _Bare) or (is_lean() and _version().startswith(TESTED))
        ):
            return importlib.import_module(module)
        try:
            with _lean():
                return importlib.import_module(module)
        except Exception:  # a placeholder may cause any error
            logger.warning("importing transformers plainly: %s fails with the lean import", module, exc_info=True)
            forget()
            return importlib.import_module(module)


def forget() -> None:
    """Drop everything that was imported leanly, so that the next import is plain."""
    _drop()
    importlib.import_module(_NAME)


def _drop() -> None:
    for name in [name for name in list(sys.modules) if name.partition(".")[0] == _NAME]:
        del sys.modules[name]


@contextlib.contextmanager
def without_scripts() -> Iterator[None]:
    """Keep torch.jit from being executed when a module registers a buffer that is not saved.

    torch then only checks that the module is not a ScriptModule, for which an empty class of that name will do.
    """
    namespace = namespace_of(sys.modules["torch.jit"])
    absent = "ScriptModule" not in namespace and is_lean()
    empty = type("ScriptModule", (), {})
    if absent:
        namespace["ScriptModule"] = empty
    try:
        yield
    finally:
        if absent and namespace.get("ScriptModule") is empty:  # else torch.jit has been executed meanwhile
            del namespace["ScriptModule"]


def _is_plain() -> bool:
    """Return whether transformers has been imported plainly."""
    found = sys.modules.get(_NAME)
    return found is not None and not isinstance(found, _Bare)


def _version() -> str:
    try:
        return importlib.metadata.version(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return ""


class _Bare(ModuleType):
    """A package whose own code is not executed, until code outside of it asks for one of its names."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if name.startswith("__") or _importing or self.__name__ != _NAME:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
            if sys.modules.get(_NAME) is self:
                logger.warning("transformers is imported as a whole, which takes seconds: %s.%s is used", _NAME, name)
                forget()
            return getattr(sys.modules[_NAME], name)


class _Placeholder(ModuleType):
    """A module from which any name can be imported. A name is an empty class, unless it was given a value."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in _PLACEHOLDERS:
            return importlib.import_module(f"{self.__name__}.{name}")
        made = type(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _replacement(name) is not None:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a placeholder is complete when it is created."""


def _replacement(name: str) -> dict[str, Any] | None:
    if name in _PLACEHOLDERS:
        return _PLACEHOLDERS[name]
    below = (stem for stem in _PLACEHOLDERS if name.startswith(stem + ".") and stem not in _REAL_BELOW)
    return next((_PLACEHOLDERS[stem] for stem in below), None)


def _placeholder(name: str) -> _Placeholder:
    module = _Placeholder(name)
    found = importlib.machinery.PathFinder.find_spec(name) if name in _REAL_BELOW else None
    where = list(found.submodule_search_locations or ()) if found is not None else []
    vars(module).update(_replacement(name) or {}, __path__=where)
    return module


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    """Import leanly in this context. At its end, torch is as before; placeholders for parts of transformers remain."""
    global _importing
    before, _importing = _importing, True
    _make_bare()
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    kept = {name: sys.modules.get(name) for name in _PLACEHOLDERS if not name.startswith(_NAME)}
    for name in kept:
        sys.modules[name] = _placeholder(name)
    added: list[tuple[dict[str, Any], str]] = []
    for module_name, names in _REGISTERING.items():
        namespace = namespace_of(sys.modules[module_name])
        added += [(namespace, name) for name in names if name not in namespace]
    for namespace, name in added:
        namespace[name] = _identity
    try:
        _simplify()
        yield
    finally:
        _importing = before
        sys.meta_path.remove(finder)
        for namespace, name in added:
            namespace.pop(name, None)
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _simplify() -> None:
    """Replace the parts of transformers that would execute torch's compiler, tracer and kinds of accelerators."""
    generic: Any = importlib.import_module("transformers.utils.generic")
    generic._register_model_output_pytree_node = lambda _: None
    for name in ("transformers.utils.import_utils", "transformers.utils"):  # the second has them from the first
        module: Any = importlib.import_module(name)
        module.is_tracing = module.is_jit_tracing = _never
        module.is_torch_flex_attn_available = module.is_torch_xpu_available = _never
        module.torch_compilable_check = _check


def _make_bare() -> None:
    for name in sorted(_BARE - sys.modules.keys()):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = _Bare(name)
        module.__spec__, module.__file__ = spec, spec.origin
        module.__path__ = list(spec.submodule_search_locations)
        vars(module)["__version__"] = _version()
        sys.modules[name] = module


__all__ = ["TESTED", "forget", "import_from_transformers", "without_scripts"]
