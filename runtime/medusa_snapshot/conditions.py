"""What has to be as it was when a snapshot was saved: the processor, the installation, the environment."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes several milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

# Variables that Python or a library reads while it starts, so that a snapshot has what they said.
_VARIABLES = (
    "ATEN_", "CUDA_", "DNNL_", "FORWARDED_ALLOW_IPS", "GLIBC_TUNABLES", "GOMP_", "KINETO_", "KMP_", "LD_", "MALLOC_",
    "MKLDNN_", "MKL_", "OMP_", "ONEDNN_", "OPENSSL_", "PYTHON", "PYTORCH_", "THP_", "TORCH",
)  # fmt: skip
# These change nothing that is kept: CUDA is initialized later. torch sets the last one itself.
_IGNORED = ("CUDA_VISIBLE_DEVICES", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR")
# These are read when they are needed. Everyone can read a snapshot, and they differ from one function to the next.
_SECRETS = ("_KEY", "_PASSWORD", "_SECRET", "_TOKEN")  # the ends of their names
# Kubernetes sets these for each service of a namespace, such as one that is called vllm.
_SERVICES = ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_UDP")
_OURS = {"GOMP_SPINCOUNT": "2000"}  # share_cores sets it, also for processes that an instance starts
# Not utf8_mode: it is also on where no language is set, and the file system's encoding says what it changes.
_FLAGS = (
    "debug", "optimize", "isolated", "ignore_environment", "no_user_site", "no_site", "dev_mode", "bytes_warning",
)  # fmt: skip
# A processor's flags for instructions that programs use, by their beginnings. The others concern the kernel.
_INSTRUCTIONS = (
    "3dnow", "abm", "adx", "aes", "amx", "apx", "avx", "bmi", "clflush", "cldemote", "clwb", "clzero", "cmov", "cmp",
    "cx", "erms", "f16c", "fma", "fpu", "fsgs", "fsrm", "fxsr", "gfni", "hle", "lahf", "mmx", "mov", "mpx", "ospke",
    "pclmul", "pni", "popcnt", "rd", "rtm", "serialize", "sha", "sse", "ssse", "tbm", "vaes", "vpclmul", "waitpkg",
    "xop", "xsave",
)  # fmt: skip
# With these, a processor has more registers. libc has noted how much room they take.
_REGISTERS = ("amx_tile", "apx", "avx", "avx512f", "mpx", "ospke")


def conditions(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Return what a snapshot that is saved now depends on, apart from files.

    ``prefixes`` are those of the variables that its own modules read.
    """
    flags = [getattr(sys.flags, name) for name in _FLAGS]
    python = (sys.version, sys.prefix, flags, sys._xoptions, sys.warnoptions, sys.getfilesystemencoding())
    return {"python": python, "processor": processor(), "variables": variables(environ, prefixes)}


def variables(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that a snapshot depends on."""
    all_prefixes = _VARIABLES + prefixes
    names = (name for name in sorted(environ) if name.startswith(all_prefixes) and name not in _IGNORED)
    names = (name for name in names if not name.endswith(_SECRETS))
    found = {name: environ[name] for name in names if environ[name] != _OURS.get(name)}
    return {name: value for name, value in found.items() if not _is_of_a_service(name, value)}


def _is_of_a_service(name: str, value: str) -> bool:
    return any(part in name for part in _SERVICES) or value.startswith(("tcp://", "udp://"))


def processor() -> list[str]:
    """Return the names that /proc/cpuinfo has for the instructions of this machine's processor, sorted.

    On aarch64, it has the kind of core, too, by which libraries choose their code, and the number of bits of addresses.
    """
    with open("/proc/cpuinfo", "rb") as file:
        lines = file.read(8192).decode("ascii", "replace").split("\n\n")[0].split("\n")  # the others are like the first
    found = {name.rstrip(): value.split() for name, _, value in (line.partition(":") for line in lines)}
    if "Features" not in found:
        return sorted(flag for flag in found.get("flags", ()) if flag.startswith(_INSTRUCTIONS))
    core = "-".join(part for name in ("CPU implementer", "CPU part") for part in found.get(name, ()))
    with open("/proc/self/stat") as file:
        stack = int(file.read().rpartition(")")[2].split()[25])
    return sorted([*found["Features"], f"core-{core}", f"{stack.bit_length()}-bit-addresses"])


def files(modules: Iterable[Any], import_path: Iterable[str]) -> list[tuple[str, int, int]]:
    """Return the files that this process has mapped, executed or trusts, and the folders of its import path.

    Each has its size in bytes and the seconds of its modification time, which is what a container image keeps of it.
    """
    names = mapped_files()
    for module in modules:
        spec = namespace(module).get("__spec__")
        if spec is not None and spec.has_location:
            names.add(spec.origin)
    names.update(filter(os.path.isdir, import_path))
    if "aiohttp.connector" in sys.modules:
        names.update(_certificates())
    return [(name, *_status(name)) for name in sorted(names) if os.path.exists(name)]


def mapped_files() -> set[str]:
    with open("/proc/self/maps") as maps:
        return {"/" + line.partition("/")[2].rstrip("\n") for line in maps if "/" in line}


def _certificates() -> list[str]:
    """Return where the certificates are that OpenSSL trusts. aiohttp reads them when it is imported."""
    import ssl

    paths = ssl.get_default_verify_paths()
    file = paths.cafile or os.path.dirname(paths.openssl_cafile)  # it could be added there
    return [file, paths.openssl_capath]


def namespace(owner: Any) -> Mapping[str, Any]:
    """Return the names in a module or class, without a lookup in it: that would execute a lazy module."""
    kind: Any
    for kind in (type(sys), type):
        if isinstance(owner, kind):
            found: Mapping[str, Any] = kind.__dict__["__dict__"].__get__(owner)
            return found
    return {}


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return why a snapshot that was saved under these conditions cannot be used now, or None if it can be."""
    if saved["python"] != now["python"]:
        return "it was made by another Python, in another place, or with other flags or another encoding of Python"
    if (why := _other_processor(set(saved["processor"]), set(now["processor"]))) is not None:
        return why
    was, found = saved["variables"], now["variables"]
    for name in sorted({*was, *found}):
        if was.get(name) != found.get(name):
            return f"it was made with {_shown(name, was)}, found {_shown(name, found)}"
    for name, *status in saved["files"]:
        try:
            if _status(name) != tuple(status):
                return f"{name} has changed since it was made"
        except OSError:
            return f"{name} is no longer there"
    return None


def _other_processor(was: set[str], found: set[str]) -> str | None:
    if missing := was - found:
        return f"it was made on a processor that has {', '.join(sorted(missing)[:3])}, and this one has not"
    if more := (found - was).intersection(_REGISTERS):
        return f"it was made on a processor without {', '.join(sorted(more))}, which this one has"
    return None


def _shown(name: str, variables: Mapping[str, str]) -> str:
    return f"{name}={variables[name]}" if name in variables else f"no {name}"


def _status(path: str) -> tuple[int, int]:
    found = os.stat(path)
    is_folder = found.st_mode & 0o170000 == 0o040000
    return 0 if is_folder else found.st_size, int(found.st_mtime)
