"""Compile the C kernels into one shared library. Standard library only: the build hook runs this file by its path."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

LIBRARY_DIR = Path(__file__).parent
SOURCE_DIR = LIBRARY_DIR / "source"
LIBRARY_NAME = "libmedusa_kernels.so"
INTERFACE = 11  # raised when the arguments of an exported function change; a library with another number is not used
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
# Each object has its own instruction set, and the choice is made when the library runs: never use -march=native.
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f")
AVX512_BF16 = (*AVX512, "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mavx512vbmi")
NEON_BF16 = ("-march=armv8.2-a+bf16",)
NEON_DOTS = ("-march=armv8.2-a+dotprod",)
_ON_ALL = tuple(
    (Path(source).stem, source, ())
    for source in (
        "compute/parallel.c", "compute/linear.c", "compute/attention.c", "compute/program.c", "chunks.c", "staging.c",
        "strings.c", "graphs.c", "snapshot/snapshot.c",
    )
)  # fmt: skip
OBJECTS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "x86_64": (
        *_ON_ALL,
        ("linear_avx2", "compute/linear_tile.c", AVX2),
        ("linear_avx512", "compute/linear_tile.c", AVX512),
        ("linear_avx512_bf16", "compute/linear_tile.c", AVX512_BF16),
        ("panels_avx2", "compute/panel_tile.c", AVX2),
        ("integer_avx2", "compute/integer_tile.c", AVX2),
        ("attention_avx2", "compute/attention_tile.c", AVX2),
        ("attention_avx512", "compute/attention_tile.c", AVX512),
        ("pointwise", "compute/pointwise.c", AVX2),
        ("recurrence", "compute/recurrence.c", AVX2),
        ("dequantize", "compute/dequantize.c", AVX2),
    ),
    "aarch64": (
        *_ON_ALL,
        ("linear_neon", "compute/linear_tile.c", ()),
        ("linear_neon_bf16", "compute/linear_tile.c", NEON_BF16),
        ("integer_neon", "compute/integer_tile.c", ()),
        ("integer_neon_dots", "compute/integer_tile.c", NEON_DOTS),
        ("attention_neon", "compute/attention_tile.c", ()),
        ("pointwise", "compute/pointwise.c", ()),
        ("recurrence", "compute/recurrence.c", ()),
        ("dequantize", "compute/dequantize.c", ()),
    ),
}


# A program that continues a snapshot. It stands alone, at an address that resume.c explains.
PROGRAM_NAME = "medusa-resume"
PROGRAM_SOURCE = "snapshot/resume.c"
PROGRAM_FLAGS = (
    "-static", "-nostdlib", "-ffreestanding", "-fpie", "-no-pie", "-fno-stack-protector",
    "-fno-tree-loop-distribute-patterns", "-mgeneral-regs-only", "-Wl,--build-id=none",
)  # fmt: skip
PROGRAM_MACHINE_FLAGS = {
    "x86_64": ("-fcf-protection=none", "-Wl,-Ttext-segment=0x600000000000"),
    "aarch64": ("-mbranch-protection=none", "-Wl,-Ttext-segment=0xd00000000000"),
}


class KernelBuildError(Exception):
    """The kernels could not be compiled; the message says why."""


def build(target: Path = LIBRARY_DIR / LIBRARY_NAME) -> Path:
    """Compile with ``$CC`` (default ``cc``) and replace ``target`` in one step: running processes keep the old file.

    The program that continues snapshots becomes a file beside it.

    Raises KernelBuildError if there is no compiler, if it compiles for a machine other than x86-64 or aarch64 Linux, or
    with the compiler's message.
    """
    from concurrent.futures import ThreadPoolExecutor  # a start needs only the library's name from this module

    compiler, architecture = _compiler(), machine()
    parts = OBJECTS[architecture]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kernels-") as folder:
        objects = [f"{folder}/{name}.o" for name, *_ in parts]
        commands = [[*compiler, *FLAGS, *flags, "-c", str(SOURCE_DIR / source)] for _, source, flags in parts]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            list(threads.map(_run, ([*each, "-o", object] for each, object in zip(commands, objects, strict=True))))
        library = Path(folder, LIBRARY_NAME)
        _run([*compiler, "-shared", "-o", str(library), *objects, "-lm", "-lpthread"])
        program = Path(folder, PROGRAM_NAME)
        flags = [flag for flag in FLAGS if flag != "-fPIC"] + [*PROGRAM_FLAGS, *PROGRAM_MACHINE_FLAGS[architecture]]
        _run([*compiler, *flags, "-o", str(program), str(SOURCE_DIR / PROGRAM_SOURCE)])
        program.replace(target.with_name(PROGRAM_NAME))
        library.replace(target)
    return target


def machine() -> str:
    """Return the machine that ``$CC`` compiles for: x86_64 or aarch64. It may be another than this one.

    Raises KernelBuildError if there is no compiler, or it compiles for another machine.
    """
    target = _run([*_compiler(), "-dumpmachine"]).strip()
    name, _, system = target.partition("-")
    if name not in OBJECTS or "linux" not in system:
        raise KernelBuildError(
            f"kernels are written for {' and '.join(OBJECTS)} Linux, the compiler makes code for {target or 'nothing'}"
        )
    return name


def is_fresh(library: Path = LIBRARY_DIR / LIBRARY_NAME) -> bool:
    """Return whether the library exists and is newer than all files that it is built from."""
    sources = [Path(__file__), *SOURCE_DIR.rglob("*.[ch]")]
    return library.exists() and library.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


def _compiler() -> list[str]:
    import shlex

    return shlex.split(os.environ.get("CC") or "cc")


def _run(command: list[str]) -> str:
    import shlex
    import subprocess

    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise KernelBuildError(f"no C compiler: {command[0]!r} was not found; install one or set CC") from error
    except subprocess.CalledProcessError as error:
        raise KernelBuildError(f"{shlex.join(command)} failed:\n{error.stderr[-2000:]}") from error


if __name__ == "__main__":
    print(build())
