"""The list of an agent's regions. The next agent needs it to recognize regions that functions bring back to it.

Any process could bring a region. But the contents of a sealed memfd cannot be changed, and its time of change cannot be
chosen. So a memfd with the inode number and the time that the last agent recorded has the same bytes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress

from ...errors import NodeRefusedError
from ...region.seals import SEAL_FUTURE_WRITE, SEAL_GROW, SEAL_SHRINK, SEAL_WRITE, seals_of
from ...storage.base import redacted

logger = logging.getLogger(__name__)


class RegionRecords:
    """The list, in a small file beside the socket, to which only the agent's user may write."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._frozen = False
        self._previous = self._read()

    def _read(self) -> dict[str, list[int]]:
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    return {}
                found = json.load(file)
            # Inode numbers start again when the machine does.
            regions = found["regions"] if found["boot"] == _boot() else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return regions if isinstance(regions, dict) else {}

    def check(self, key: str, descriptor: int) -> None:
        """Raise NodeRefusedError unless the last agent made this region for this checkpoint, and it is sealed."""
        recorded = self._previous.get(key)
        if recorded is None or recorded != _identity(descriptor):
            raise NodeRefusedError(f"this region of {redacted(key)} is none that the node agent made")

    def write(self, regions: Mapping[str, int]) -> None:
        """Record the present regions, and keep the last agent's, which may still be brought.

        ``regions`` maps keys to descriptors.
        """
        if self._frozen:
            return
        known = {**self._previous, **{key: found for key, fd in regions.items() if (found := _identity(fd))}}
        # Write a new file and rename it, so that a killed agent leaves the old list or the new one. If other users can
        # write to the folder, a file of that name may be their link, so it must not be written to.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with suppress(FileNotFoundError):
                os.unlink(f"{self._path}.new")
            with open(os.open(f"{self._path}.new", flags, 0o600), "w") as file:
                json.dump({"boot": _boot(), "regions": known}, file)
            os.replace(f"{self._path}.new", self._path)
        except OSError as error:
            logger.warning("the list of regions cannot be written (%s); a restart will fetch them again", error)

    def freeze(self) -> None:
        """Write no more, so that the list stays as it is."""
        self._frozen = True


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _identity(descriptor: int) -> list[int] | None:
    """Return numbers that identify a memfd of this user that is sealed against writing and resizing.

    Returns None for any other file.
    """
    try:
        seals = seals_of(descriptor)
    except OSError:
        return None
    size_is_fixed = seals & SEAL_SHRINK and seals & SEAL_GROW
    if not size_is_fixed or not seals & (SEAL_WRITE | SEAL_FUTURE_WRITE):
        return None
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        return None
    return [status.st_dev, status.st_ino, status.st_uid, status.st_ctime_ns, status.st_size]
