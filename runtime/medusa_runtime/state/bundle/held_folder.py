"""A bundle's folder on this machine, held open from before its place is checked until its last byte is read."""

from __future__ import annotations

import os

from ...storage.folder import FolderStore


class HeldFolder(FolderStore):
    """Reads the files of an open folder, which this object closes. ``place`` is its path without links."""

    def __init__(self, descriptor: int) -> None:
        self.place = os.readlink(f"/proc/self/fd/{descriptor}")
        super().__init__(self.place, descriptor, confined=False)

    def _open_file(self, key: str) -> int:
        return self._open_below(key)

    def close(self) -> None:
        """Close the folder and its files. May be called twice."""
        super().close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


__all__ = ["HeldFolder"]
