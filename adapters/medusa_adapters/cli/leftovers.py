"""Files that an interrupted command leaves in a folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


class Leftovers:
    """Files in ``folder`` that match ``pattern`` and were not there when this was made; a new folder, too."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder = folder
        self._pattern = pattern
        self._known = set(folder.rglob(pattern)) if folder.exists() else None

    def remove(self) -> None:
        with suppress(OSError):
            for path in {*self._folder.rglob(self._pattern)} - (self._known or set()):
                path.unlink(missing_ok=True)
            if self._known is None:
                for folder in sorted((path for path in self._folder.rglob("*") if path.is_dir()), reverse=True):
                    with suppress(OSError):  # it is not empty
                        folder.rmdir()
                self._folder.rmdir()
