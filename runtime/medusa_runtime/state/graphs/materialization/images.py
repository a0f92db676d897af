"""Kernel images by their digest, and the image that a captured kernel is from."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ....errors import StateError
from .cubin import Cubin, CubinKernel, parse_cubin

logger = logging.getLogger(__name__)


class ImageStore:
    """The cubins seen while capturing. A kernel's name alone is no key: one library may define it several times.

    ``handles``: CUmodule or CUlibrary → the digest of the image that was loaded as it, where that is known.
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
        """Keep an image, and return its digest. Raises StateError when it is no cubin."""
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
        """The image that defines this kernel; None when none does. Raises StateError when several might."""
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
        """The image that a kernel is from; empty when that is not known, or when it must not be loaded twice.

        ``loaded``: handles of the module and the library that the kernel is in.
        """
        try:
            image = self._loaded_as(name, loaded) or self.find(name, parameters, registers)
        except StateError:
            return ""
        # A second copy would miss what kernels have written to the image's variables. One byte is the compiler's tag.
        return image if image and self._parsed[image].mutable_bytes <= 1 else ""

    def _loaded_as(self, name: str, loaded: Iterable[int]) -> str | None:
        """The image that was loaded as one of these handles, if it has a kernel of this name."""
        digests = [self.handles[handle] for handle in loaded if handle in self.handles]
        return next((digest for digest in digests if digest in self._by_kernel.get(name, ())), None)
