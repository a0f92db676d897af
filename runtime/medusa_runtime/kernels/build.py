"""Compile the C kernels into one shared library. Standard library only: the build hook runs this file by its path."""

from __future__ import annotations

import os
import platform
import shlex
import tempfile
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
LIBRARY_NAME = "libmedusa_kernels.so"
INTERFACE = 2  # raised with every change of an exported function's arguments; a library of another one is not used
# Without traps and errno the compiler may vectorize rintf and selections. No other rule of IEEE 754 is relaxed.
FLAGS = (
    f"-DMEDUSA_INTERFACE={INTERFACE}",
    "-O3",
    "-fPIC",
    "-std=c11",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)
# Each object has its own instruction set, and the machine decides which one runs: never -march=native.
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f")
AVX512_BF16 = (*AVX512, "-mavx512vl", "-mavx512bf16")
OBJECTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("parallel", "parallel.c", ()),
    ("linear", "linear.c", ()),
    ("linear_avx2", "linear_tile.c", AVX2),
    ("linear_avx512", "linear_tile.c", AVX512),
    ("linear_avx512_bf16", "linear_tile.c", AVX512_BF16),
    ("pointwise", "pointwise.c", AVX2),
    ("dequantize", "dequantize.c", AVX2),
    ("attention", "attention.c", ()),
    ("chunks", "chunks.c", ()),
    ("attention_avx2", "attention_tile.c", AVX2),
    ("attention_avx512", "attention_tile.c", AVX512),
)


class KernelBuildError(Exception):
    """The kernels could not be compiled; the message says why."""


def build(target: Path = SOURCE_DIR / LIBRARY_NAME) -> Path:
    """Compile with ``$CC`` (default ``cc``) and replace ``target`` in one step: running processes keep the old file.

    Raises KernelBuildError: not an x86-64 Linux machine, no compiler, or the compiler's message.
    """
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise KernelBuildError(
            f"kernels are written for x86-64 Linux, this is {platform.machine()} {platform.system()}"
        )
    from concurrent.futures import ThreadPoolExecutor  # a start needs only the library's name from this module

    compiler = shlex.split(os.environ.get("CC") or "cc")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kernels-") as folder:
        objects = [f"{folder}/{name}.o" for name, *_ in OBJECTS]
        commands = [[*compiler, *FLAGS, *flags, "-c", str(SOURCE_DIR / source)] for _, source, flags in OBJECTS]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            list(threads.map(_run, ([*each, "-o", object] for each, object in zip(commands, objects, strict=True))))
        library = Path(folder, LIBRARY_NAME)
        _run([*compiler, "-shared", "-o", str(library), *objects, "-lm", "-lpthread"])
        library.replace(target)
    return target


def is_fresh(library: Path = SOURCE_DIR / LIBRARY_NAME) -> bool:
    """Whether the library exists and is newer than all files that it is built from."""
    sources = [Path(__file__), *SOURCE_DIR.glob("*.[ch]")]
    return library.exists() and library.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


def _run(command: list[str]) -> None:
    import subprocess

    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise KernelBuildError(f"no C compiler: {command[0]!r} was not found; install one or set CC") from error
    except subprocess.CalledProcessError as error:
        raise KernelBuildError(f"{shlex.join(command)} failed:\n{error.stderr[-2000:]}") from error


if __name__ == "__main__":
    print(build())
