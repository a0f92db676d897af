"""Cubins: compiled ones that are kept here, fresh ones where there is nvcc, and NVIDIA's own."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from medusa_runtime.errors import StateError
from medusa_runtime.state.graphs import ImageStore
from medusa_runtime.state.graphs.materialization.cubin import parse_cubin

FATBIN = struct.pack("<I", 0xBA55ED50)
RMS_NORM = "_Z8rms_normILi4EEvPKfS1_Pfif"


def fat_cubins(data: bytes, arch: int = 90) -> Iterator[bytes]:
    """The cubins for one architecture in the fat binaries of a file.

    In a library a fat binary begins at a multiple of 8 bytes.
    """
    start = data.find(FATBIN)
    while start >= 0:
        header, size = struct.unpack_from("<HQ", data, start + 6) if start % 8 == 0 else (4, 0)
        at, stop = start + header, start + header + size
        while at < stop:
            kind, own, padded = struct.unpack_from("<H2xIQ", data, at)
            stored, found = (struct.unpack_from("<I", data, at + place)[0] for place in (16, 28))
            image = data[at + own : at + own + (stored or padded)]
            if kind == 2 and found == arch:  # not PTX
                compressed = image.startswith(b"\x28\xb5\x2f\xfd")
                yield zstandard.ZstdDecompressor().decompress(image, 1 << 28) if compressed else image
            at += own + padded
        start = data.find(FATBIN, max(at, start + 4))


def test_kernels_of_a_cubin(cubins: Path) -> None:
    cubin = parse_cubin((cubins / "toy_a.cubin").read_bytes())
    assert set(cubin.kernels) == {
        "wide", "add_bias", "cluster_scale", "add_checked", "embed", "scale", "gemv", RMS_NORM
    }  # fmt: skip
    assert cubin.kernels[RMS_NORM].parameters == ((0, 8), (8, 8), (16, 8), (24, 4), (28, 4))
    assert cubin.kernels["gemv"].parameters == ((0, 64),)
    assert cubin.kernels["scale"].parameters == ((0, 8), (8, 4), (12, 4))
    assert cubin.kernels["scale"].registers > 0
    assert cubin.variables == {"bias_table": 16}
    assert cubin.mutable_bytes == 0


def test_tags_of_the_library_are_no_state_and_a_flag_is(cubins: Path) -> None:
    tags, flag = ((cubins / f"toy_{name}.cubin").read_bytes() for name in "gh")
    assert len(parse_cubin(tags).variables) == 2
    assert parse_cubin(tags).mutable_bytes == 0
    assert parse_cubin(flag).mutable_bytes == 1
    assert ImageStore([tags]).of("count", ((0, 8),)) == hashlib.sha256(tags).hexdigest()
    assert ImageStore([flag]).of("count", ((0, 8),)) == "", "a second copy would not know that the kernel has run"


def test_a_kernel_that_is_local_to_its_image(cubins: Path) -> None:
    """torch's kernels are, where their namespace has no name: ``layer_norm``, ``silu``."""
    image = (cubins / "toy_g.cubin").read_bytes()
    (name,) = (name for name in parse_cubin(image).kernels if "count_twice" in name)
    assert ImageStore([image]).of(name, ((0, 8),)) == hashlib.sha256(image).hexdigest()


def test_parameters_with_padding(cubins: Path) -> None:
    assert parse_cubin((cubins / "toy_c.cubin").read_bytes()).kernels["scale"].parameters == ((0, 8), (8, 4), (16, 8))


def test_one_name_in_several_images(cubins: Path) -> None:
    images = ImageStore((cubins / f"toy_{name}.cubin").read_bytes() for name in "abc")
    digests = {name: hashlib.sha256((cubins / f"toy_{name}.cubin").read_bytes()).hexdigest() for name in "abc"}
    registers = {name: images.cubin(digest).kernels["scale"].registers for name, digest in digests.items()}
    short, long = ((0, 8), (8, 4), (12, 4)), ((0, 8), (8, 4), (16, 8))
    assert images.find("scale", long) == digests["c"]
    assert images.find("scale", short, registers["a"]) == digests["a"]
    assert images.find("scale", short, registers["b"]) == digests["b"]
    with pytest.raises(StateError, match="scale is defined with other code in 2 images"):
        images.find("scale", short)
    assert images.of("scale", short) == ""
    assert images.find("gone", short) is None


def test_cubins_in_a_fat_binary(cubins: Path) -> None:
    """The cubins are compressed, as in NVIDIA's libraries."""
    parsed, alone = (
        parse_cubin(data)
        for data in (*fat_cubins((cubins / "toy_packed.fatbin").read_bytes()), (cubins / "toy_a.cubin").read_bytes())
    )
    assert {name: kernel.parameters for name, kernel in parsed.kernels.items()} == {
        name: kernel.parameters for name, kernel in alone.kernels.items()
    }


def test_damaged_cubins(cubins: Path) -> None:
    data = (cubins / "toy_b.cubin").read_bytes()
    for size in range(0, len(data), 97):
        with pytest.raises(StateError):
            parse_cubin(data[:size])
    with pytest.raises(StateError, match="another machine"):
        parse_cubin(Path(sys.executable).resolve().read_bytes())
    for at in range(len(data)):  # any result is fine, but no other error
        try:
            parse_cubin(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        except StateError:
            pass


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc (see cubins/build.sh)")
def test_the_kept_cubins_are_what_nvcc_makes(cubins: Path, tmp_path: Path) -> None:
    source, made = cubins / "toy_b.cu", tmp_path / "toy_b.cubin"
    subprocess.run(["nvcc", "-arch=sm_90", "-O1", "-cubin", str(source), "-o", str(made)], check=True, timeout=240)
    fresh, kept = parse_cubin(made.read_bytes()), parse_cubin((cubins / "toy_b.cubin").read_bytes())
    assert {name: kernel.parameters for name, kernel in fresh.kernels.items()} == {
        name: kernel.parameters for name, kernel in kept.kernels.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nvidias_own_libraries(tmp_path: Path) -> None:
    """nvidia-nvjpeg is a small wheel with kernels for sm_90, compressed like those of cuBLAS."""
    wheel = os.environ.get("MEDUSA_TEST_CUDA_WHEEL", "nvidia-nvjpeg==13.*")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), wheel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.skip(f"{wheel} cannot be downloaded: {done.stderr.strip()[-200:]}")
    found = [parse_cubin(cubin) for path in tmp_path.rglob("lib*.so.*") for cubin in fat_cubins(path.read_bytes())]
    assert len(found) >= 10
    assert sum(len(cubin.kernels) for cubin in found) >= 200
