"""The kernel images of a bundle, which are read where they lie in the file's bytes."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping

from ...errors import StateError

Image = bytes | memoryview


class BundledImages(Mapping[str, memoryview]):
    """A file's kernel images by digest, which is the SHA-256 of an image.

    An image is checked when it is first read, so nobody gets a damaged one. Images are most of a file: they are not
    copied, and threads that read several check them at the same time.
    """

    def __init__(self, unchecked: Mapping[str, memoryview]) -> None:
        self._unchecked = unchecked
        self._checked: dict[str, memoryview] = {}

    def __getitem__(self, digest: str) -> memoryview:
        """Raises StateError if the image is damaged."""
        if digest not in self._checked:
            image = self._unchecked[digest]
            if hashlib.sha256(image).hexdigest() != digest:  # for an image, this releases the interpreter's lock
                raise StateError(f"the kernel image {digest[:16]} is damaged (its sha256 is wrong); materialize again")
            self._checked[digest] = image
        return self._checked[digest]

    def __contains__(self, digest: object) -> bool:
        return digest in self._unchecked

    def __iter__(self) -> Iterator[str]:
        return iter(self._unchecked)

    def __len__(self) -> int:
        return len(self._unchecked)


def address_of(data: Image) -> int:
    """Return where an object's bytes are in this process's memory. The caller keeps the object."""
    buffer = (ctypes.c_void_p * 10)()  # a Py_buffer, which begins with the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), buffer, 0)
    address = buffer[0] or 0
    ctypes.pythonapi.PyBuffer_Release(buffer)
    return address


__all__ = ["BundledImages", "Image", "address_of"]
