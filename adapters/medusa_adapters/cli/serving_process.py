"""The process of `medusa serve` or `medusa node` that has imported everything: saved as a snapshot, and continued.

``resume`` runs before anything else in a start, so this module imports next to nothing.
"""

from __future__ import annotations

import os
import sys

from medusa_snapshot.conditions import namespace
from medusa_snapshot.resuming import default_folder, has_started_anew, start_anew
from medusa_snapshot.resuming import resume as resume_snapshot

TYPE_CHECKING = False  # typing takes several milliseconds to import
if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.node.settings import NodeSettings

# The engines that snapshots have imported, with the variables that those read beside what every snapshot depends on.
VARIABLES: dict[str, tuple[str, ...]] = {
    "torch": ("CUBLAS", "LIBNVVM_", "NPY_", "NUMPY_", "NVRTC_", "OPENBLAS_", "PTXAS_", "TRITON_"),  # if it is for GPUs
    "vllm": (
        "AIOHTTP_", "AOT", "AZURE_OPENAI_ENDPOINT", "COMPRESSED_TENSORS_", "CXX", "DISABLE_TELEMETRY", "DO_NOT_TRACK",
        "GOTO", "GRPC_", "HF_", "HUGGINGFACE_", "INDUCTOR_", "LOGURU_", "NPY_", "NUMPY_", "OPENAI_API_TYPE",
        "OPENAI_API_VERSION", "OPENBLAS_", "OPENCV_", "OTEL_ATTRIBUTE_", "OTEL_PROPAGATORS", "OTEL_PYTHON_",
        "OTEL_SPAN_", "PILLOW_", "PROMETHEUS_", "prometheus_multiproc_dir", "PROTOCOL_BUFFERS_", "PYDANTIC_", "PYZMQ_",
        "SAGEMAKER_TRANSFORMS_", "SSL", "SYMPY_", "TOKENIZERS_", "TRANSFORMERS_", "TRITON_", "TVM_FFI_",
        "USE_HUB_KERNELS", "USE_TORCH_XLA", "VLLM_", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XGRAMMAR_",
    ),
}  # fmt: skip
# What a start imports beside the engine, the server and the platforms.
_MODULES = (
    "encodings.idna",
    "jinja2.sandbox",
    "medusa_adapters.cli.command_line",
    "medusa_adapters.cli.node",
    "medusa_adapters.cli.serve",
    "medusa_adapters.report.gantt",
    "medusa_cluster",
    "medusa_runtime.engine.preimport",
    "medusa_runtime.fetch.local_files",
    "medusa_runtime.logs",
    "medusa_runtime.node.agent",
    "medusa_runtime.storage.azure",
    "medusa_runtime.storage.google_cloud",
    "medusa_runtime.storage.http.store",
    "medusa_runtime.storage.hub",
    "medusa_runtime.storage.s3",
    "medusa_vllm",
)
_FLAG, _VARIABLE = "--snapshots", "MEDUSA_SNAPSHOTS"
OTHER_FOLDER = "choose another folder with --out, and name it in --snapshots"  # where this one cannot be written to
resumed_with: str | None = None  # the engine of the snapshot that this process continues from
why_not: str | None = None  # why the snapshot that is there is not used
is_outdated = False  # whether a new one would be used


def resume(given: list[str]) -> None:
    """Become a process that has imported everything, and runs this command line, if there is a snapshot of one."""
    global why_not, is_outdated
    is_outdated = not has_started_anew()
    chosen = _chosen(given, _FLAG, _VARIABLE)
    name = _wanted(given)
    if chosen != "none" and name is not None:
        is_default = chosen in ("", "auto")
        folder = default_folder() if is_default else chosen
        why_not = resume_snapshot(folder, name, given, VARIABLES[name])
        if why_not is None and not is_default:
            why_not = f"there is none for --engine {name} in {chosen}"


def _wanted(given: list[str]) -> str | None:
    """Return the name of the snapshot for this command line. An agent that warms several engines imports them."""
    if given[0] == "serve":
        return snapshot_of(_chosen(given, "--engine", "MEDUSA_ENGINE") or "torch")
    if any(word in ("ping", "status") or word.startswith("--drop") for word in given):
        return None
    warm = _chosen(given, "--prewarm", "MEDUSA_NODE_PREWARM")
    engines = {each.partition("=")[0].strip() for each in warm.split(",")}
    return snapshot_of(engines.pop()) if len(engines) == 1 else None


def snapshot_of(engine: str) -> str | None:
    """Return the name of the snapshot from which a start with this engine continues. None: there are no such ones."""
    return "torch" if engine == "none" else engine if engine in VARIABLES else None


def _chosen(given: list[str], flag: str, variable: str) -> str:
    """Return what a setting was given, at last. The command line has not been parsed yet."""
    chosen = os.environ.get(variable, "")
    for index, word in enumerate(given):
        if word == "--":
            break
        if word == flag and index + 1 < len(given):
            chosen = given[index + 1]
        elif word.startswith(flag + "="):
            chosen = word.removeprefix(flag + "=")
    return chosen


def check(settings: Settings) -> None:
    """Start anew without the snapshot, if this process continues from it and something here needs another one."""
    if resumed_with is None:
        return
    is_other = snapshot_of(settings.engine) != resumed_with or settings.snapshots == "none"
    if is_other or (settings.vllm_mode == "compatible" if resumed_with == "vllm" else _is_too_lean(settings)):
        start_anew()
    if settings.handler is not None and (name := _shadowed(settings.handler)) is not None:
        start_anew(f"it has another module {name} than the one beside the handler")


def check_agent(settings: NodeSettings) -> None:
    """Start the agent anew without the snapshot, if it continues from one that does not fit its settings."""
    if resumed_with is None:
        return
    is_other = set(settings.prewarm) != {resumed_with} or settings.snapshots == "none"
    if is_other or (resumed_with == "torch" and _is_too_lean(settings)):
        start_anew()


def _is_too_lean(settings: Settings | NodeSettings) -> bool:
    """Return whether this process has imported torch leanly, against its settings."""
    from medusa_runtime.imports.lazy_torch import is_lean

    return settings.torch_import == "plain" and is_lean()


def command_for(name: str, folder: str) -> str:
    """Return the command that makes the snapshot of this name for a start with this folder in its settings."""
    import shlex

    command = "medusa snapshot" if name == "torch" else f"medusa snapshot --engine {name}"
    return command if folder == "auto" else f"{command} --out {shlex.quote(folder)}"


def log_use(engine: str, folder: str, device: str = "auto") -> None:
    """Log why the snapshot that is there for this engine is not used; or that it is, where that is untried."""
    import logging

    logger = logging.getLogger(__name__)
    if why_not:
        command = command_for(snapshot_of(engine) or engine, folder)
        advice = f"; `{command}` makes a new one" if is_outdated else ""
        logger.info("the snapshot is not used: %s%s", why_not, advice)
    elif resumed_with and (tried := on_aarch64() or ("is untried on GPUs" if device != "cpu" and _has_gpu() else None)):
        logger.info("this process continues from a snapshot, which %s; --snapshots none uses none", tried)


def on_aarch64() -> str | None:
    """Return how starts from snapshots were tried on this machine's kind of processor, if that is aarch64."""
    return "on aarch64 was tried on an emulated machine only" if os.uname().machine == "aarch64" else None


def _has_gpu() -> bool:
    from medusa_runtime.device.choice import obstacle

    return obstacle(os.environ) is None


def _shadowed(handler: str) -> str | None:
    """Return a module of this process that is not the one that the handler would import, or None.

    A handler finds modules in its own folder first, such as packages that were installed there.
    """
    place = handler.partition(":")[0]
    return _shadowed_in(os.path.dirname(os.path.abspath(place)) if place.endswith(".py") else os.getcwd(), "")


def _shadowed_in(folder: str, package: str) -> str | None:
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in names:
        path = os.path.join(folder, name if name.endswith(".py") else os.path.join(name, "__init__.py"))
        full_name = package + name.removesuffix(".py")
        spec = namespace(sys.modules.get(full_name)).get("__spec__")
        if spec is None:
            continue
        found = None
        if os.path.exists(path):
            found = full_name if spec.origin != path else None
        elif spec.origin is None:  # it has no file of its own, and parts in several folders, such as google
            found = _shadowed_in(os.path.join(folder, name), full_name + ".")
        if found is not None:
            return found
    return None


def save(folder: str, engine: str, tokenizers: str) -> None:
    """Import what the processes of an instance with this engine import, and save this process.

    It also keeps the tokenizers of all files in the folder ``tokenizers``. Raises SnapshotError.
    """
    from medusa_runtime.compiled_library import LIBRARY
    from medusa_runtime.process import share_cores
    from medusa_snapshot.folders import NotedFolders
    from medusa_snapshot.saving import SnapshotError
    from medusa_snapshot.saving import save as save_snapshot

    environ = dict(os.environ)
    share_cores()  # as in an instance: libgomp reads this when it is loaded
    with NotedFolders() as folders:
        if (why := _import_vllm() if engine == "vllm" else _import_torch()) is not None:
            raise SnapshotError(why)
        _import_everything_else()
    _keep_tokenizers(tokenizers)
    _leave_threads()

    def resumed(arguments: list[str]) -> int:
        global resumed_with
        resumed_with = engine
        folders.renew()
        if engine == "vllm":
            from medusa_vllm.imports import renew_offline_mode

            renew_offline_mode()  # it is for engines, not for a handler
        from .command_line import run

        return run(arguments)

    save_snapshot(folder, engine, LIBRARY, environ, resumed, VARIABLES[engine])


def _leave_threads() -> None:
    """Go on as a child process, which has none of the threads that libraries keep for later, such as OpenBLAS's.

    They are made anew when they are needed, as in the zygote's children. Raises SnapshotError for threads of Python.
    """
    import faulthandler
    import signal
    import threading

    from medusa_runtime.process import die_with_parent
    from medusa_snapshot.saving import SnapshotError

    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise SnapshotError(f"expected imports that start no thread of Python, found {names}")
    parent = os.getpid()
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status < 0:
            print(f"the process was killed by signal {-status} while it was saved", file=sys.stderr)
        os._exit(1 if status < 0 else status)
    die_with_parent(parent)
    faulthandler.unregister(signal.SIGALRM)


def _import_torch() -> str | None:
    """Import what an instance with the torch engine imports. Returns a reason why that cannot be kept, or None."""
    import importlib

    from medusa_handler.server.function_process import preimport as import_function
    from medusa_runtime.device.choice import installed_cuda
    from medusa_runtime.engine.gpu.preimport import preimport as import_gpu_engine
    from medusa_runtime.imports import lazy_torch
    from medusa_runtime.models.registry import import_families
    from medusa_runtime.registry import engine_kind, imported

    # gunicorn and Flask come first: their lean imports leave out modules that nothing has imported yet.
    import_function()
    if installed_cuda() is not None:
        importlib.import_module("torch")  # plainly, as handlers import it there: nothing is left to be executed
        import_gpu_engine()
    elif (why := lazy_torch.why_not_lean_in_handlers()) is not None:
        return f"torch would be imported as a whole: {why}"
    else:
        lazy_torch.import_torch()
    import_families()
    imported(engine_kind("torch").open)
    return None


def _import_vllm() -> str | None:
    """Import all of vLLM that an instance may need. Returns a reason why that cannot be kept, or None."""
    from medusa_runtime.config import Settings
    from medusa_runtime.zygote import load_engine_class
    from medusa_vllm.factory import is_compatible
    from medusa_vllm.version import is_for_gpus

    if is_for_gpus():
        return "this vLLM is built for GPUs"
    load_engine_class(Settings(engine="vllm", device="cpu"))
    return "this version of vLLM has its own processes, which would import it anew" if is_compatible() else None


def _import_everything_else() -> None:
    import importlib
    from contextlib import suppress

    from medusa_handler.server.function_process import preimport as import_function
    from medusa_runtime.instance.roles import preimport as import_roles

    from ..platforms.base import ADAPTERS, load

    import_function()
    import_roles()
    for name in ADAPTERS:
        load(name)
    for name in _MODULES:
        importlib.import_module(name)
    for name in ("tokenizers", "botocore.session"):
        with suppress(ImportError):
            importlib.import_module(name)
    from .command_line import prepare

    for command in ("serve", "node"):
        prepare(command)


def _keep_tokenizers(folder: str) -> None:
    from medusa_runtime.engine.serving.tokenizer import keep
    from medusa_runtime.errors import MedusaError
    from medusa_snapshot.saving import SnapshotError

    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        try:
            keep(data)
        except MedusaError as error:
            raise SnapshotError(str(error)) from None


def main() -> int:
    """Save this process as the command line says, which has the arguments of ``save``; returns the exit status.

    SIGALRM ends it, and shows on stderr where it was.
    """
    import faulthandler
    import signal

    from medusa_snapshot import library_files

    library_files.open_high()
    from medusa_snapshot.saving import SnapshotError

    faulthandler.register(signal.SIGALRM, all_threads=False, chain=True)
    try:
        save(*sys.argv[1:])
    except SnapshotError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or sys.argv[1]}: {error.strerror}; {OTHER_FOLDER}", file=sys.stderr)
        return 1
    return 0
