"""Leave the machine code of other GPUs out of CUDA libraries.

A library has a container ("fatbin") for each source file of kernels, and each container has an image for each
architecture: machine code (a cubin), or PTX, which the driver compiles. The driver takes one of them for its GPU. Here,
each container keeps only what a driver may take for the named GPUs, at its front, and zeros follow up to its old end.
So no address in the library changes. Zeros are next to nothing in a compressed layer or archive, and are never read.

The idea is from Zhang et al., "The Hidden Bloat in Machine Learning Systems" (MLSys 2025), which overwrites images and
keeps their headers. Here, the driver finds a container as if it had been compiled for these GPUs only.
"""

from __future__ import annotations

import argparse
import mmap
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all images
_IMAGE = struct.Struct("<HHIQ12xI8xQ")  # kind, version, bytes of this header, bytes of code, architecture, flags
_MAGIC, _CONTAINER_VERSION, _IMAGE_VERSION = 0xBA55ED50, 1, 0x101
_PTX, _CUBIN = 1, 2
_LEAST_HEADER_BYTES = 64
_VARIANTS = {0: "", 0x100000: "a", 0x200000: "f"}  # in the flags
_VARIANT_BITS, _KNOWN_BITS = 0x300000, 0x130FFFF
_SECTION = struct.Struct("<II16xQQ24x")  # name, type, offset, bytes
_NO_BYTES = 8  # SHT_NOBITS
_CODE, _LINKED_CODE = b".nv_fatbin", b"__nv_relfatbin"
_BLOCK_BYTES = 1 << 24
_NON_ZERO = re.compile(rb"[^\0]")


class UnknownFormat(ValueError):
    """A library that is not a whole ELF file, or whose containers have a format that this module does not know."""


class Image(NamedTuple):
    """A container's code for one architecture, such as 90 (9.0), and where it is in the library, in bytes."""

    kind: int
    arch: int
    variant: str  # "a": for this architecture only, "f": for its family (the same major version)
    start: int
    size_bytes: int

    def runs_on(self, gpu: int) -> bool:
        """Return whether a driver may take the image for a GPU (CUDA programming guide, "Compute capabilities")."""
        if self.variant == "a":
            return self.arch == gpu
        if self.kind == _PTX and not self.variant:
            return self.arch <= gpu
        return self.arch <= gpu and self.arch // 10 == gpu // 10


class Container(NamedTuple):
    """The images of one source file, and where they are in the library, in bytes."""

    start: int
    end: int
    images: tuple[Image, ...]

    def kept(self, gpus: Iterable[int]) -> tuple[Image, ...]:
        """Return the images that a driver may take for any of the GPUs; all of them if there is none."""
        chosen = {image for gpu in gpus for image in _newest(self.images, gpu)}
        return tuple(image for image in self.images if image in chosen) or self.images


class Slimmed(NamedTuple):
    """Bytes of GPU code before and after, and the architectures that had machine code."""

    before_bytes: int
    after_bytes: int
    architectures: frozenset[int]


def _newest(images: Iterable[Image], gpu: int) -> list[Image]:
    """Return the images for the newest architecture that run on the GPU: machine code or, without any, PTX."""
    running = [image for image in images if image.runs_on(gpu)]
    running = [image for image in running if image.kind == _CUBIN] or running
    newest = max((image.arch for image in running), default=0)
    return [image for image in running if image.arch == newest]


def slim(library: Path, gpus: Sequence[int]) -> Slimmed:
    """Replace a library by one without the code for other GPUs. A file that is linked to it does not change.

    Raises UnknownFormat, and changes nothing, if its format is not known.
    """
    with library.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
        containers = list(_containers(data))
        kept = [container.kept(gpus) for container in containers]
        if containers:
            new = library.with_name(f".{library.name}.new")
            try:
                with new.open("wb") as out:
                    _write(data, zip(containers, kept, strict=True), out)
                shutil.copymode(library, new)
                new.replace(library)
            finally:
                new.unlink(missing_ok=True)
    images = [image for container in containers for image in container.images]
    return Slimmed(
        sum(image.size_bytes for image in images),
        sum(image.size_bytes for each in kept for image in each),
        frozenset(image.arch for image in images if image.kind == _CUBIN),
    )


def _write(data: mmap.mmap, containers: Iterable[tuple[Container, tuple[Image, ...]]], out: IO[bytes]) -> None:
    out.truncate(len(data))  # what is not written stays a hole, which reads as zeros
    done = 0
    for container, kept in containers:
        _copy(data, done, container.start, out)
        size_bytes = sum(image.size_bytes for image in kept)
        out.write(_CONTAINER.pack(_MAGIC, _CONTAINER_VERSION, _CONTAINER.size, size_bytes))
        for image in kept:
            _copy(data, image.start, image.start + image.size_bytes, out)
        done = out.seek(container.end)
    _copy(data, done, len(data), out)


def _copy(data: mmap.mmap, start: int, end: int, out: IO[bytes]) -> None:
    for at in range(start, end, _BLOCK_BYTES):
        out.write(data[at : min(end, at + _BLOCK_BYTES)])


def _containers(data: mmap.mmap) -> Iterator[Container]:
    sections = [section for section in _sections(data) if section[0] in (_CODE, _LINKED_CODE)]
    if len(sections) > 1 or any(name == _LINKED_CODE for name, _, _ in sections):
        raise UnknownFormat("it has code that is linked when it is loaded, or several sections of code")
    for _, start, end in sections:
        at = start
        while found := _NON_ZERO.search(data, at, end):
            container = _container(data, found.start(), end)
            yield container
            at = container.end


def _sections(data: mmap.mmap) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, start and end of each section that has bytes in the file (System V ABI, chapter 4)."""
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        raise UnknownFormat("it is no 64-bit ELF file")
    (table,), (entry, count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HHH", data, 58)
    if entry != _SECTION.size or names >= count or table + entry * count > len(data):
        raise UnknownFormat("its table of sections is cut off")
    sections = [_SECTION.unpack_from(data, table + entry * index) for index in range(count)]
    for _, kind, start, size_bytes in sections:
        if kind != _NO_BYTES and start + size_bytes > len(data):
            raise UnknownFormat("one of its sections is cut off")
    for name, kind, start, size_bytes in sections:
        if kind != _NO_BYTES:
            at = min(sections[names][2] + name, len(data))
            yield data[at : data.find(b"\0", at)], start, start + size_bytes


def _container(data: mmap.mmap, start: int, end: int) -> Container:
    if start + _CONTAINER.size > end:
        raise UnknownFormat(f"the container at byte {start} is cut off")
    magic, version, header_bytes, images_bytes = _CONTAINER.unpack_from(data, start)
    if (magic, version, header_bytes) != (_MAGIC, _CONTAINER_VERSION, _CONTAINER.size):
        raise UnknownFormat(f"the container at byte {start} is of an unknown version")
    at, stop = start + header_bytes, start + header_bytes + images_bytes
    if stop > end:
        raise UnknownFormat(f"the container at byte {start} is cut off")
    images: list[Image] = []
    while at < stop:
        images.append(_image(data, at, stop))
        at += images[-1].size_bytes
    return Container(start, stop, tuple(images))


def _image(data: mmap.mmap, start: int, end: int) -> Image:
    if start + _LEAST_HEADER_BYTES > end:
        raise UnknownFormat(f"the image at byte {start} is cut off")
    kind, version, header_bytes, code_bytes, arch, flags = _IMAGE.unpack_from(data, start)
    variant = _VARIANTS.get(flags & _VARIANT_BITS)
    if version != _IMAGE_VERSION or kind not in (_PTX, _CUBIN) or flags & ~_KNOWN_BITS or variant is None:
        found = f"kind {kind}, version {version:#x}, flags {flags:#x}"
        raise UnknownFormat(f"the image at byte {start} is of an unknown kind ({found})")
    if header_bytes < _LEAST_HEADER_BYTES or start + header_bytes + code_bytes > end:
        raise UnknownFormat(f"the image at byte {start} is cut off")
    return Image(kind, arch, variant, start, header_bytes + code_bytes)


def slim_all(libraries: Iterable[tuple[str, Path]], gpus: Sequence[int]) -> None:
    """Slim libraries, and print a line for each. The first of each pair is the name to print.

    Ends the process if there is a GPU for which no library has machine code.
    """
    found: set[int] = set()
    for name, path in libraries:
        try:
            slimmed = slim(path, gpus)
        except ValueError as error:  # of mmap, if a file is empty
            print(f"left as it is: {name}: {error}", flush=True)
            continue
        found |= slimmed.architectures
        if slimmed.before_bytes:
            print(f"kept {slimmed.after_bytes / 1e6:6.1f} of {slimmed.before_bytes / 1e6:6.1f} MB  {name}", flush=True)
    for gpu in gpus:
        if not any(Image(_CUBIN, arch, "", 0, 0).runs_on(gpu) for arch in found):
            there = ", ".join(map(name_of, sorted(found))) or "none"
            sys.exit(f"--gpu {name_of(gpu)}: expected machine code for it in some library, found {there}")


def parse_gpus(text: str) -> list[int]:
    """Return [80, 90] for "8.0,9.0"."""
    for each in text.split(","):
        if not re.fullmatch(r"[1-9][0-9]?\.[0-9]", each):
            raise argparse.ArgumentTypeError(f"expected compute capabilities such as 9.0 or 8.0,9.0, found {text!r}")
    return sorted({int(each.replace(".", "")) for each in text.split(",")})


def name_of(arch: int) -> str:
    """Return "9.0" for 90."""
    return f"{arch // 10}.{arch % 10}"
