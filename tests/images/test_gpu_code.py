"""Libraries without the machine code of other GPUs: what is left, where it is, and what is never changed.

``nothing.fatbin`` is one container with all images of which the libraries here are built. It was made from a kernel of
our own (``.visible .entry nothing() { ret; }``) with CUDA 13.5's tools: ``ptxas -arch sm_N`` for each architecture, and
then ``fatbinary -64 --compress-all --create=nothing.fatbin --image3=kind=elf,sm=N,file=N.cubin …``.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

IMAGES = Path(__file__).parents[2] / "images"
FATBIN = Path(__file__).with_name("nothing.fatbin").read_bytes()
NAMES = ("7.5", "8.0", "8.6", "9.0", "9.0a", "10.0", "10.0f", "12.0f", "ptx 8.0", "ptx 9.0")

Build = Callable[..., Path]


def images() -> dict[str, bytes]:
    """Return each image of the file, with its header."""
    found, at = [], 16
    while at < len(FATBIN):
        header, code = struct.unpack_from("<4xIQ", FATBIN, at)
        found.append(FATBIN[at : at + header + code])
        at += header + code
    return dict(zip(NAMES, found, strict=True))


@pytest.fixture
def gpu_code(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(IMAGES)
    return runpy.run_path(str(IMAGES / "gpu_code.py"))


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Link a library as nvcc does: containers in one section, and a pointer to each in another."""

    def link(name: str, *containers: str, section: str = ".nv_fatbin", gap: int = 0) -> Path:
        lines = [f'.section {section},"a",@progbits', ".balign 8"]
        for number, content in enumerate(containers):
            kept = b"".join(images()[each] for each in content.split(", "))
            (tmp_path / f"{number}.bin").write_bytes(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(kept)) + kept)
            lines += [f"fatbin{number}:", f'.incbin "{tmp_path}/{number}.bin"']
            lines += [f".zero {gap}"] if gap and not number else []
        lines += ['.section .nvFatBinSegment,"aw",@progbits', ".balign 8", ".globl wrappers", "wrappers:"]
        for number in range(len(containers)):
            lines += [".int 0x466243b1, 1", f".quad fatbin{number}, 0"]
        (tmp_path / "library.s").write_text("\n".join(lines) + "\n")
        library = tmp_path / name
        flags = ("-shared", "-nostdlib", "-s", "-Wl,--build-id=none", "-Wl,-z,noexecstack")
        subprocess.run(["cc", *flags, "-o", library, tmp_path / "library.s"], check=True, timeout=240)
        return library

    return link


def size(names: str) -> int:
    return sum(len(images()[each]) for each in names.split(", "))


ALL = ", ".join(NAMES)


@pytest.mark.parametrize(
    ("gpus", "content", "kept"),
    [
        ([90], ALL, "9.0, 9.0a"),
        ([80], ALL, "8.0"),
        ([89], ALL, "8.6"),  # machine code of the same major version runs
        ([89], "7.5, 8.0, ptx 8.0", "8.0"),
        ([100], ALL, "10.0, 10.0f"),
        ([103], "9.0, 10.0f, ptx 8.0", "10.0f"),  # its family
        ([121], "9.0, 9.0a, 12.0f", "12.0f"),
        ([75, 90], ALL, "7.5, 9.0, 9.0a"),
        ([90], "7.5, 8.0, 8.6, ptx 8.0", "ptx 8.0"),  # no machine code of 8.x runs on 9.0
        ([90], "8.0, 10.0f, ptx 8.0, ptx 9.0", "ptx 9.0"),
        ([120], "9.0a, 10.0, ptx 8.0, ptx 9.0", "ptx 9.0"),
        ([80], "9.0, ptx 8.0, ptx 9.0", "ptx 8.0"),
        ([80, 90], "8.0, ptx 8.0", "8.0, ptx 8.0"),  # 9.0 takes the PTX
        ([91], "9.0a, 10.0f, ptx 8.0", "ptx 8.0"),  # 9.0a runs on 9.0 alone
        ([90], "7.5, 10.0f", "7.5, 10.0f"),  # nothing runs on it: what the driver says stays the same
    ],
)
def test_a_container_keeps_what_the_driver_may_take(
    gpu_code: dict[str, Any], build: Build, gpus: list[int], content: str, kept: str
) -> None:
    """The result is the library that would have been linked of what is kept, with zeros up to the old end."""
    library = build("library.so", content, "7.5")
    slimmed = gpu_code["slim"](library, gpus)
    wanted = build("wanted.so", kept, "7.5", gap=size(content) - size(kept))
    assert library.read_bytes() == wanted.read_bytes()
    assert slimmed[:2] == (size(content + ", 7.5"), size(kept + ", 7.5"))


def test_a_loaded_library_has_its_containers_where_they_were(gpu_code: dict[str, Any], build: Build) -> None:
    library = build("library.so", ALL, "8.0, ptx 8.0", "7.5")
    gpu_code["slim"](library, [90])
    wrappers = (ctypes.c_uint64 * 9).in_dll(ctypes.CDLL(str(library)), "wrappers")
    for index, kept in enumerate(("9.0, 9.0a", "ptx 8.0", "7.5")):
        found = ctypes.string_at(wrappers[3 * index + 1], 16 + size(kept))
        assert struct.unpack_from("<IHHQ", found) == (0xBA55ED50, 1, 16, size(kept))
        assert found[16:] == b"".join(images()[each] for each in kept.split(", "))


def test_a_second_time_changes_nothing(gpu_code: dict[str, Any], build: Build) -> None:
    library = build("library.so", ALL, "8.0, ptx 8.0", "7.5, 8.0")
    gpu_code["slim"](library, [90])
    before = library.read_bytes()
    assert gpu_code["slim"](library, [90])[:2] == (size("9.0, 9.0a, ptx 8.0, 7.5, 8.0"),) * 2
    assert library.read_bytes() == before


def test_its_mode_stays_and_a_linked_file_is_not_changed(
    gpu_code: dict[str, Any], build: Build, tmp_path: Path
) -> None:
    library = build("library.so", ALL)
    library.chmod(0o751)
    cached = tmp_path / "cached.so"
    os.link(library, cached)
    before = cached.read_bytes()
    gpu_code["slim"](library, [90])
    assert cached.read_bytes() == before != library.read_bytes()
    assert library.stat().st_mode & 0o777 == 0o751
    assert not list(tmp_path.glob(".*"))


def test_a_library_without_gpu_code_is_not_written(gpu_code: dict[str, Any], build: Build) -> None:
    library = build("library.so")
    before = library.stat()
    assert gpu_code["slim"](library, [90])[:2] == (0, 0)
    assert library.stat() == before


def changed(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    """Change what is ``offset`` bytes after the first container's start."""

    def change(data: bytes) -> bytes:
        at = data.index(struct.pack("<I", 0xBA55ED50)) + offset
        return data[:at] + value + data[at + len(value) :]

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda data: data[:40], "no 64-bit ELF file"),
        (lambda data: b"#!/bin/sh\n" * 100, "no 64-bit ELF file"),
        (lambda data: data[:4] + b"\1" + data[5:], "no 64-bit ELF file"),
        (lambda data: b"", "cannot mmap an empty file"),
        (lambda data: data[:2000], "table of sections is cut off"),
        (lambda data: data[:40] + b"\xff" * 8 + data[48:], "table of sections is cut off"),
        (changed(0, b"\x51"), "unknown version"),
        (changed(4, b"\2"), "unknown version"),
        (changed(6, b"\x20"), "unknown version"),
        (changed(8, b"\xff" * 8), "container at byte .* is cut off"),
        (changed(8, b"\x08\0"), "image at byte .* is cut off"),
        (changed(16, b"\0\1"), "unknown kind .kind 256,"),  # of fatbinary --concat
        (changed(18, b"\2"), "version 0x102"),
        (changed(20, b"\0\0\0\0"), "image at byte .* is cut off"),
        (changed(24, b"\xff" * 8), "image at byte .* is cut off"),
        (changed(16 + 40 + 2, b"\x30"), "flags 0x308011"),
        (changed(16 + 40 + 4, b"\1"), "flags 0x100008011"),
    ],
)
def test_a_library_of_another_form_is_left_as_it_is(
    gpu_code: dict[str, Any],
    build: Build,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[bytes], bytes],
    error: str,
) -> None:
    library, whole = build("library.so", "7.5, 9.0"), build("whole.so", ALL)
    library.write_bytes(odd := change(library.read_bytes()))
    with pytest.raises(ValueError, match=error):
        gpu_code["slim"](library, [90])
    gpu_code["slim_all"]([("odd", library), ("whole", whole)], [90])
    assert library.read_bytes() == odd
    assert sorted(path.name for path in library.parent.glob("*.so")) == ["library.so", "whole.so"]
    left, kept = capsys.readouterr().out.splitlines()
    assert left.startswith("left as it is: odd: ")
    assert kept.endswith("whole")


def test_code_that_is_linked_later_is_left_as_it_is(gpu_code: dict[str, Any], build: Build) -> None:
    library = build("library.so", ALL, section="__nv_relfatbin")
    with pytest.raises(gpu_code["UnknownFormat"], match="linked when it is loaded"):
        gpu_code["slim"](library, [90])


@pytest.mark.parametrize("gpus", [[70], [90, 110]])
def test_a_gpu_without_any_machine_code_is_one_error(gpu_code: dict[str, Any], build: Build, gpus: list[int]) -> None:
    name = gpu_code["name_of"](gpus[-1])
    found = r"found 7\.5, 8\.0, 8\.6, 9\.0, 10\.0, 12\.0"
    with pytest.raises(SystemExit, match=rf"--gpu {name}: expected machine code for it in some library, {found}"):
        gpu_code["slim_all"]([("library", build("library.so", ALL))], gpus)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """images/install.py, with an environment of its own."""
    monkeypatch.syspath_prepend(IMAGES)
    module = runpy.run_path(str(IMAGES / "install.py"))
    monkeypatch.delitem(sys.modules, "gpu_code")
    module["keep_gpus"].__globals__["HOME"] = tmp_path / "home"
    return module


def test_an_image_records_the_gpus_that_it_is_built_for(install: dict[str, Any], build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "home/lib/python3.11/site-packages/torch/lib"
    folder.mkdir(parents=True)
    library = build("library.so", ALL)
    before = library.read_bytes()
    library.rename(folder / "libtorch_cuda.so")
    (folder / "libtorch.so").symlink_to("libtorch_cuda.so")
    install["keep_gpus"](["torch/lib/*.so"], [80, 90])
    assert (folder / "libtorch.so").is_symlink()
    assert (folder / "libtorch_cuda.so").read_bytes() != before
    assert (tmp_path / "home/medusa-gpus.txt").read_text() == "8.0\n9.0\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("slim", "9.0"), "GPU='9.0': expected a variant with code for GPUs, found slim"),
        (("cuda", "sm_90"), "GPU: expected compute capabilities such as 9.0 or 8.0,9.0, found 'sm_90'"),
    ],
)
def test_a_wrong_gpu_ends_the_build_before_anything_is_installed(arguments: tuple[str, ...], error: str) -> None:
    command = [sys.executable, IMAGES / "install.py", "packages", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr.strip()) == (1, "", error)
