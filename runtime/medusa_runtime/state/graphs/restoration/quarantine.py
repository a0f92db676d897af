"""Remember bundles whose graphs have broken a context, so that they are not tried again with the same driver.

A replay that reads unmapped memory ends the process, so the mark must outlive it. It is written to the bundle's folder
if possible, or else to this user's cache, or else to a folder for temporary files. The next engine of the same instance
always finds it, and other machines do if they share the folder.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....checkpoint.reader import split_url
from ....config import Settings
from ....errors import MedusaError
from ....storage.base import scheme_of
from ....storage.local import LocalStore
from ...bundle.locate import FOLDER
from ...key import driver_version

logger = logging.getLogger(__name__)

FILE = "quarantine.json"  # {the graphs' digest (``digest_of``): {"driver": its version, "reason": one line}}
_REASON_CHARACTERS = 300
_MOST_BYTES = 1 << 20  # a thousand marks take half of it


class Quarantine:
    """The marks of bundles. ``settings`` say where the bundle is, and ``environ`` where this user's cache is."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        url, name = (settings.state, "") if settings.state else (split_url(settings.model or "")[0], FOLDER)
        folders = []
        if url and scheme_of(url) in ("", "file"):
            folders.append(LocalStore(url, check=False).local_path(name))
        self._existing_only = len(folders)  # 1 with a bundle's own folder, which must not be created here
        if cache := environ.get("XDG_CACHE_HOME") or (environ.get("HOME") and environ["HOME"] + "/.cache"):
            folders.append(Path(cache) / "medusa")
        self._folders = [*folders, Path(environ.get("TMPDIR") or tempfile.gettempdir()) / f"medusa-{os.getuid()}"]

    def reason(self, digest: str) -> str | None:
        """Return why the graphs with this digest must not be used here; None if nothing is known."""
        for folder in self._folders:
            entry = self._read(folder).get(digest)
            if entry is not None and entry["driver"] == driver_version():
                return entry["reason"]
        return None

    def add(self, digest: str, reason: str) -> bool:
        """Write a mark, and drop those of other drivers. Return False if no folder can be written to."""
        entry = {"driver": driver_version(), "reason": reason[:_REASON_CHARACTERS]}
        for folder in self._folders:
            kept = {key: old for key, old in self._read(folder).items() if old["driver"] == entry["driver"]}
            try:
                if self._folders.index(folder) >= self._existing_only:
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(folder, {**kept, digest: entry})
            except OSError as error:
                logger.debug("no mark in %s: %s", folder, error)
                continue
            return True
        return False

    def _read(self, folder: Path) -> dict[str, dict[str, str]]:
        """Return the marks in a folder. A damaged file counts as empty, so that graphs are tried.

        A bundle's author may have put something else there: a pipe, a link to a device, a file of gigabytes.
        """
        try:
            if folder.stat().st_uid not in (os.getuid(), 0) and folder is self._folders[-1]:
                return {}  # any user can make a folder among temporary files
            data, info = LocalStore(str(folder)).read(FILE, 0, _MOST_BYTES)
            found: Any = json.loads(data) if info.size <= _MOST_BYTES else None
        except (MedusaError, OSError, ValueError, RecursionError):
            return {}
        return dict(_entries(found)) if isinstance(found, dict) else {}


def _write(folder: Path, entries: dict[str, dict[str, str]]) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".quarantine-", dir=folder)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(entries, file, indent=1)
            os.fchmod(file.fileno(), 0o644)  # by its name, another user's link could be meant
        os.replace(name, folder / FILE)
    except OSError:
        os.unlink(name)
        raise


def _entries(found: dict[Any, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    for digest, entry in found.items():
        if isinstance(entry, dict) and isinstance(entry.get("driver"), str) and isinstance(entry.get("reason"), str):
            yield digest, entry


__all__ = ["FILE", "Quarantine"]
