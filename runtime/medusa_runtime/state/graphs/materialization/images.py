"""Kernel images by digest, and the image from which a captured kernel comes."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ....errors import StateError
from .cubin import Cubin, CubinKernel, parse_cubin

logger = logging.getLogger(__name__)


class ImageStore:
    """The cubins that were loaded while capturing.

    A kernel's name alone does not identify it: a library may define it several times. ``handles`` has the digest of the
    image of a CUmodule or CUlibrary, if that is known.
    """

    def __init__(self, images: Iterable[bytes] = (), handles: Mapping[int, str] | None = None) -> None:
        self.handles = dict(handles or {})
        self.data: dict[str, bytes] = {}
        self._parsed: dict[str, Cubin] = {}
        self._by_kernel: defaultdict[str, list[str]] = defaultdict(list)
        for image in images:
            try:
                self.add(image)
            except StateError as error:
                logger.info("a loaded module of %d bytes is left out: %s", len(image), error)

    def add(self, image: bytes) -> str:
        """Keep an image, and return its digest. Raises StateError if it is not a cubin."""
        digest = hashlib.sha256(image).hexdigest()
        if digest not in self.data:
            parsed = parse_cubin(image)
            self.data[digest] = image
            self._parsed[digest] = parsed
            for name in parsed.kernels:
                self._by_kernel[name].append(digest)
        return digest

    def cubin(self, digest: str) -> Cubin:
        return self._parsed[digest]

    def find(self, name: str, parameters: tuple[tuple[int, int], ...], registers: int = 0) -> str | None:
        """Return the digest of the image that defines this kernel; None without one. StateError if several might."""
        matches: list[tuple[str, CubinKernel]] = []
        for digest in self._by_kernel.get(name, ()):
            kernel = self._parsed[digest].kernels[name]
            if kernel.parameters == parameters and (not registers or kernel.registers == registers):
                matches.append((digest, kernel))
        if not matches:
            return None
        if len({kernel.code for _, kernel in matches}) > 1:
            raise StateError(f"{name} is defined with other code in {len(matches)} images")
        return matches[0][0]

    def of(
        self, name: str, parameters: tuple[tuple[int, int], ...], registers: int = 0, loaded: Iterable[int] = ()
    ) -> str:
        """Return the digest of a kernel's image; empty if it is not known, or must not be loaded twice.

        ``loaded`` are the handles of the kernel's module and library.
        """
        try:
            image = self._loaded_as(name, loaded) or self.find(name, parameters, registers)
        except StateError:
            return ""
        # A second copy would lack what kernels have written to the image's variables.
        return image if image and not self._parsed[image].mutable_bytes else ""

    def _loaded_as(self, name: str, loaded: Iterable[int]) -> str | None:
        """Return the image of one of these handles, if it has a kernel of this name."""
        digests = [self.handles[handle] for handle in loaded if handle in self.handles]
        return next((digest for digest in digests if digest in self._by_kernel.get(name, ())), None)
