"""The lean import of torch: without the parts that inference never uses, such as compilers, tracers and numpy.

About three quarters of the Python code that ``import torch`` executes serves ``torch.compile``, ``torch.export``,
TorchScript and training. Here those modules are lazy (``lazy_modules.py``): they are executed when a name is looked up
in them, and ``complete`` executes all of them. The lists below were found by experiment. They hold for the versions of
torch in ``TESTED`` on the Pythons in ``TESTED_PYTHONS``. Elsewhere, torch is imported plainly.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .gc_paused import gc_paused
from .lazy_modules import LazyFinder, LazyHooks, LazyModule, LazyPolicy, StandIn, StandIns, namespace_of
from .lock import TESTED_PYTHONS

logger = logging.getLogger(__name__)

TESTED = ("2.11.", "2.12.", "2.13.", "2.14.", "2.15.")
_TESTED_ON_GPUS = ("2.11.",)  # newer ones register operators for GPUs in Python, which a lean import leaves out
# These variables ask for something that torch does while it is imported, and that a lean import would put off.
_PLAIN_IF_SET = ("TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_CUDA_SANITIZER", "TORCH_COMPILE_DEBUG")
# Modules that replace themselves in sys.modules, or that are imported for what they register.
_EAGER = frozenset(
    {"torch", "torch._C", "torch._VF", "torch._logging._registrations"}
    | {f"torch.{name}.config" for name in ("_functorch", "_export", "distributed", "_dynamo", "_inductor", "compiler")}
    | {"torch.fx.experimental._config", "torch.utils._config_module", "torch.utils.serialization.config"}
    | {"torch.utils.deterministic", "torch.backends"}
    | {f"torch.backends.{name}" for name in ("cudnn", "cudnn.rnn", "mkldnn", "quantized", "python_native", "xnnpack")}
    | {"torch.backends.miopen", "torch.backends.opt_einsum", "torch._native.cutedsl_utils"}
    | {"torch._native.triton_utils", "torch.distributed._functional_collectives"}
    | {"torch.fx.experimental.symbolic_shapes"}
)
# Modules that eager inference uses, or code that looks for a device; they are in no import cycle.
_INDEPENDENT = (
    *(f"torch.{device}" for device in ("accelerator", "cpu", "cuda", "mps", "mtia", "xpu")),
    *(
        "torch._environment",
        "torch._guards",
        "torch.backends.mha",
        "torch.utils._device",
        "torch.nn.attention",
        "torch.fft",
        "torch.linalg",
        "torch.special",
    ),
)
_PREREQUISITES: dict[str, tuple[str, ...]] = {
    "torch.multiprocessing._atfork": (),  # imports nothing of its package
    "torch.package._mangling": (),
    # These two import each other, and only this order works.
    "torch._library": ("torch.utils._pytree",),
    "torch.jit.annotations": ("torch.jit", "torch.distributed.rpc"),
}
# Names that an executed module binds at import and uses only when one of its own features is called.
_LATE = {
    "torch._functorch.autograd_function": ("custom_function_call",),
    "torch._higher_order_ops": ("cond", "while_loop"),
    "torch._linalg_utils": ("_symeig", "cholesky", "eig", "lstsq", "matrix_rank", "qr", "solve"),
    "torch._lobpcg": ("lobpcg",),
    "torch._strobelight.compile_time_profiler": ("StrobelightCompileTimeProfiler",),
    "torch._vmap_internals": ("_vmap", "vmap"),
    "torch.autograd.gradcheck": ("gradcheck", "gradgradcheck"),
    "torch.func": ("vmap",),
    "torch.nn.parallel": ("DataParallel",),
}

_active: _LeanImport | None = None


def import_torch(*, numpy: bool = True, gpu: bool = False) -> ModuleType:
    """Import ``torch``, leanly where that is known to work. Call it before anything else imports torch.

    Eager inference (tensors, ``torch.nn``, its functions, sampling, threads) works as after a plain import. Everything
    else is executed at its first use.

    With ``numpy=False``, torch finds no numpy in this process. Otherwise it would import numpy, which takes a tenth of
    a second, for the first tensor that is made from a buffer or a list.

    With ``gpu``, the import is lean only with a version of torch with which that was tested on GPUs.
    """
    if "torch" in sys.modules:
        if _active is None:
            logger.info("torch is used as it is: it was imported before the engine's import of it")
        elif not numpy:
            _hide_numpy(sys.modules["torch"])  # it was imported for other processes, too
        return sys.modules["torch"]
    make_import_lean(_why_not_lean_on_gpus if gpu else why_not_lean)
    torch = importlib.import_module("torch")
    if not numpy and _active is not None:
        _hide_numpy(torch)
    return torch


def make_import_lean(why_plain: Callable[[Path], str | None]) -> None:
    """Make the first import of torch lean, wherever it happens, unless ``why_plain`` then returns a reason not to.

    ``why_plain`` is given the path of torch's __init__.py.
    """
    if "torch" not in sys.modules:
        _LeanImport(why_plain).install()


def make_handlers_import_lean(how: str) -> None:
    """Make the first import of torch in a handler lean. ``how`` is the setting ``--torch-import``.

    With ``auto``, a torch that is built for GPUs is imported plainly. With ``lean``, it is imported leanly, too.
    """
    if "torch" not in sys.modules:
        _LeanImport(
            lambda file: why_not_lean_in_handlers(file, how),
            then=_share_with_processes,
        ).install()
    elif _active is not None:
        _share_with_processes(sys.modules["torch"])  # it was imported before this process was forked


def why_not_lean_in_handlers(file: Path | None = None, how: str = "auto") -> str | None:
    """Return a reason to import torch plainly for user code, or None. ``file`` is torch's __init__.py."""
    if file is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return "it is not installed"
        file = Path(spec.origin)
    return why_not_lean(file) or _extended() or (_built_for_gpu(file) if how == "auto" else None)


def complete() -> None:
    """Execute every lazy module. Idempotent; does nothing after a plain import."""
    if _active is not None:
        _active.complete()


def is_lean() -> bool:
    """Return whether torch was imported leanly, and some of its modules are still pending."""
    return _active is not None and _active.pending


def why_not_lean(file: Path) -> str | None:
    """Return a reason to import torch plainly, or None. ``file`` is torch's __init__.py."""
    python = sys.version_info[:2]
    if sys.implementation.name != "cpython" or python not in TESTED_PYTHONS:
        tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED_PYTHONS)
        return f"{sys.implementation.name} {python[0]}.{python[1]}, the lean import was tested with CPython {tested}"
    version = _version(file.with_name("version.py"))
    if not version.startswith(TESTED):
        return f"version {version or 'unknown'}, the lean import was tested with {', '.join(f'{v}*' for v in TESTED)}"
    for name in _PLAIN_IF_SET:
        if os.environ.get(name):
            return f"{name} is set"
    return None


def _why_not_lean_on_gpus(file: Path) -> str | None:
    version = _version(file.with_name("version.py"))
    if not version.startswith(_TESTED_ON_GPUS):
        tested = ", ".join(f"{v}*" for v in _TESTED_ON_GPUS)
        return f"version {version or 'unknown'}, the lean import was tested on GPUs with {tested}"
    return why_not_lean(file)


def _extended() -> str | None:
    """Return, if an installed package extends torch, that reason to import it plainly, or None."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        from importlib.metadata import entry_points  # slow: like torch, it reads those of every installed package

        for entry in entry_points(group="torch.backends"):
            return f"{entry.value} extends it"
    return None


def _built_for_gpu(file: Path) -> str | None:
    if re.search(r"^(?:cuda|hip|xpu)\b[^=]*= ['\"]", file.with_name("version.py").read_text(), re.MULTILINE):
        return "it is built for GPUs, and the lean import was tested without"
    return None


def _version(path: Path) -> str:
    """Read ``__version__`` from a version.py. An import of it would import its whole package."""
    try:
        found = re.search(r"^__version__ = ['\"]([^'\"]+)", path.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found else ""


class _LeanImport:
    """One lean import of torch, and the work that it puts off."""

    def __init__(self, why_plain: Callable[[Path], str | None], then: Callable[[Any], None] = lambda _: None) -> None:
        self._then = then
        self._builtins: list[tuple[Any, str]] = []
        self._finder = LazyFinder(
            "torch",
            LazyPolicy(
                packages=("torch", "torchgen", "numpy", "sympy"),
                eager=_EAGER,
                whole=frozenset({"numpy", "sympy"}),
                independent=_INDEPENDENT,
                absent=frozenset({"torch.privateuseone"}),  # torch.manual_seed looks for it
                prerequisites=_PREREQUISITES,
                on_executed={
                    "torch.distributed.distributed_c10d": _register_process_groups,
                    "torch.distributed.rpc": _define_rrefs,
                    "torch.fx.experimental.sym_node": _look_for_dynamic_ints,
                },
            ),
            StandIns(
                importing=self._stand_ins(),
                lasting=self._lasting(),
                bound_by=("torch", "torch.autograd", "torch.nn"),
            ),
            LazyHooks(
                why_not=why_plain,
                importing=self._importing,
                completing=self._without_modes,
                on_complete=self._catch_up,
            ),
        )

    def install(self) -> None:
        self._finder.install()

    @contextlib.contextmanager
    def _importing(self) -> Iterator[None]:
        global _active  # there is one torch in a process
        _active = self
        autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # or torch would read every installed package's entry points
        flags = sys.getdlopenflags()
        sys.setdlopenflags(flags & ~os.RTLD_NOW | os.RTLD_LAZY)  # bind lazily: few of 43,000 functions are ever called
        try:
            with gc_paused():  # the import makes a hundred thousand objects, which all stay
                yield
                torch: Any = sys.modules["torch"]
                if set_metaclass := getattr(torch._C, "_set_generator_metaclass", None):  # since 2.13
                    # torch._prims.rng_prims does it at the end of a plain import; torch.Generator fails without.
                    base = sys.modules.get("torch._custom_class_base") or torch._opaque_base  # renamed in 2.15
                    set_metaclass(base.OpaqueBaseMeta)
                # LSTM, EmbeddingBag, interpolate and others ask for it at each call; TorchScript knows it by identity.
                namespace_of(torch.jit)["is_scripting"] = torch._jit_internal.is_scripting
                self._then(torch)
        finally:
            sys.setdlopenflags(flags)
            if autoload is None:
                del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
            else:
                os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = autoload

    def _stand_ins(self) -> dict[str, dict[str, Any]]:
        names: dict[str, dict[str, Any]] = {
            module: {name: StandIn.of(module, name) for name in late} for module, late in _LATE.items()
        }
        names["torch._logging"] = {"_init_logs": lambda: None}
        names["torch.distributed.rpc"] = {"is_available": lambda: False}
        # torch has called this since 2.15. _register_process_groups calls the real one once that module is executed.
        names["torch.distributed.distributed_c10d"] = {"_register_process_group_opaque_type": lambda: None}
        names["torch.library"] = {"Library": _Library()}
        return names

    def _lasting(self) -> dict[str, dict[str, Any]]:
        """Return names that eager inference, or a module that it imports late, looks up."""
        return {
            "torch.fx.operator_schemas": {"_SCHEMA_TO_SIGNATURE_CACHE": {}},
            "torch.jit": {"_builtins": _Builtins(self._builtins), "is_tracing": _query("torch.jit", "is_tracing")},
            # torch._C compares each function that it registers with this one.
            "torch.library": {"fallthrough_kernel": StandIn.of("torch.library", "fallthrough_kernel")},
            "torch.nested": {"nested_tensor": StandIn.of("torch.nested", "nested_tensor")},
            "torch.compiler": {
                name: _query("torch.compiler", name) for name in ("is_compiling", "is_dynamo_compiling", "is_exporting")
            },
            "torch.fx.experimental.sym_node": {"DynamicInt": _DynamicInt},
            "numpy": {"__version__": _numpy_version()},  # torch._C reads it, to warn about a bug in one version
        }

    @staticmethod
    def _without_modes() -> contextlib.AbstractContextManager[object]:
        """Leave the caller's modes (a default device, inference mode) while torch's own modules are executed."""
        torch = sys.modules["torch"]
        stack = contextlib.ExitStack()
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch.inference_mode(False))
        return stack

    @property
    def pending(self) -> bool:
        return next(self._finder.pending(), None) is not None

    def complete(self) -> None:
        self._finder.complete()

    def _catch_up(self) -> None:
        """Do what a plain import does beyond executing modules."""
        self._replace_stand_ins()
        if device := sys.modules.get("torch.utils._device"):
            device._device_constructors.cache_clear()  # it may hold stand-ins
        register = importlib.import_module("torch.jit._builtins")._register_builtin
        for function, name in self._builtins:
            register(function, name)
        importlib.import_module("torch._logging")._init_logs()
        if "torch._native" in sys.modules:  # since 2.12
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                # torch._native does this at its end. Here it was executed before its operators were there.
                importlib.import_module("torch._native.registry")._register_all_overrides()

    def _replace_stand_ins(self) -> None:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "torch":
                for key, value in list(namespace_of(module).items()):
                    if type(value) is StandIn:
                        setattr(module, key, value.real())
        triton = sys.modules["torch"]._TritonLibrary
        triton.lib = triton.lib.real()


def _share_with_processes(torch: Any) -> None:
    """Share tensors that are sent to another process with it, as after an import of torch.multiprocessing."""
    reducers = importlib.import_module("multiprocessing.reduction").ForkingPickler

    def share(value: Any) -> Any:
        complete()  # this registers the real reducers
        return reducers._extra_reducers[type(value)](value)

    for kind in {*torch._storage_classes, *torch._tensor_classes, torch.Tensor, torch.nn.Parameter}:
        reducers.register(kind, share)


class _DynamicIntType(type):
    # torch._C does this check for each size and dimension that it parses, a thousand times in a step of a model. Before
    # sym_node is executed, nothing can be an instance. So until then a function in C answers, without any Python code.
    __instancecheck__: Any = ().__contains__

    def __call__(cls, *args: Any) -> Any:
        complete()
        return namespace_of(sys.modules["torch.fx.experimental.sym_node"])["DynamicInt"](*args)


def _look_for_dynamic_ints() -> None:
    def is_instance(cls: type, instance: object) -> bool:
        real = namespace_of(sys.modules["torch.fx.experimental.sym_node"])["DynamicInt"]
        return real is not cls and isinstance(instance, real)

    _DynamicIntType.__instancecheck__ = is_instance  # type: ignore[assignment, method-assign]


class _DynamicInt(metaclass=_DynamicIntType):
    """A stand-in for sym_node's class. torch._C looks it up once, for the first size that it parses, and keeps it."""


class _OperatorLibrary(StandIn):
    """A stand-in for a library of operators, which is made when it is first used.

    torch itself defines operators in one when CUDA is initialized. They are registered as torch.library would, which
    takes no Python code of it.
    """

    def __init__(self, namespace: str, kind: str, *more: Any) -> None:
        super().__init__(self._make)
        self._arguments = namespace, kind, *more
        self._registered: Any = None  # what the dispatcher knows of it before torch.library is executed
        self._made: Any = None

    def define(self, schema: str, *more: Any, **options: Any) -> Any:
        if more or options or self._is_executed:
            return self._resolve().define(schema, *more, **options)
        return self._dispatcher.define(schema, "", ())

    def impl(self, name: str, function: Any, key: str = "", *more: Any, **options: Any) -> None:
        if more or options or not key or self._is_executed:
            self._resolve().impl(name, function, key, *more, **options)
        else:
            self._dispatcher.impl(name, key, function, False)

    @property
    def _is_executed(self) -> bool:
        return type(sys.modules.get("torch.library")) is not LazyModule

    @property
    def _dispatcher(self) -> Any:
        if self._registered is None:
            namespace, kind, *_ = self._arguments
            make = sys.modules["torch"]._C._dispatch_library
            self._registered = make(kind, namespace, "", __file__, 0)
        return self._registered

    def _make(self) -> Any:
        if self._made is None:
            library = importlib.import_module("torch.library").Library
            if self._made is None:  # executing torch.library may use this very stand-in
                namespace, kind, *more = self._arguments
                # The dispatcher takes one definition of a namespace, and any number of fragments.
                self._made = library(namespace, "FRAGMENT" if self._registered is not None else kind, *more)
        return self._made


class _Library:
    """A stand-in for torch.library.Library."""

    def __call__(self, *args: Any) -> StandIn:
        return _OperatorLibrary(*args)

    def __or__(self, other: Any) -> Any:  # torch 2.12 annotates a variable with it
        return typing.ForwardRef("torch.library.Library") | other


def _query(module: str, name: str) -> Callable[[], bool]:
    """Return a stand-in for the function of this name in a module of torch: it returns False until that is executed."""

    def query() -> bool:
        real: Callable[[], bool] = getattr(sys.modules[module], name)
        return real is not query and real()

    query.__name__ = query.__qualname__ = name
    query.__module__ = module
    return query


class _Builtins:
    """A stand-in for torch.jit._builtins, which collects operators' TorchScript names until TorchScript is imported."""

    def __init__(self, kept: list[tuple[Any, str]]) -> None:
        self._kept = kept

    def _register_builtin(self, function: Any, name: str) -> None:
        self._kept.append((function, name))


def _hide_numpy(torch: Any) -> None:
    """Make torch._C look for numpy, which it does only once, while an import of numpy fails."""
    module = sys.modules.get("numpy")
    if module is not None and type(module) is not LazyModule:
        return  # it has already been executed
    vars(sys)["modules"]["numpy"] = None  # this makes an import of it fail
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is no numpy, which is what we want
            torch.tensor([0.0])
    finally:
        if module is None:
            del sys.modules["numpy"]
        else:
            sys.modules["numpy"] = module


def _numpy_version() -> str:
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).with_name("version.py")
    found = re.search(r"^(?:version|short_version|__version__) = ['\"]([^'\"]+)", path.read_text(), re.MULTILINE)
    return found.group(1) if found else "0"


def _register_process_groups() -> None:
    register = getattr(sys.modules["torch.distributed.distributed_c10d"], "_register_process_group_opaque_type", None)
    if register is not None:
        register()


def _define_rrefs() -> None:
    """Define what torch._jit_internal defines at import where rpc is available: TorchScript's remote references."""
    rpc = sys.modules["torch.distributed.rpc"]
    if not rpc.is_available():
        return
    reference, native = rpc.RRef, importlib.import_module("torch._C._distributed_rpc").PyRRef

    def is_rref(annotation: Any) -> bool:
        if annotation is reference:
            raise RuntimeError("expected a type within RRef, as in RRef[int], found RRef alone")
        return typing.get_origin(annotation) is reference

    internal = importlib.import_module("torch._jit_internal")
    vars(internal).update(
        RRef=reference, PyRRef=native, is_rref=is_rref, is_rref_instance=lambda value: isinstance(value, native)
    )
