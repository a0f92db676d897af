"""The custom_ids that are taken, millions of them, in little memory."""

from __future__ import annotations

import hashlib

_CACHE_KIB = 32 << 10


class CustomIds:
    """A set of custom_ids in a temporary database, which is on the disk as far as it does not fit 32 MB of memory."""

    def __init__(self) -> None:
        import sqlite3

        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        self._database.execute("PRAGMA journal_mode=OFF")
        self._database.execute("PRAGMA synchronous=OFF")
        self._database.execute("CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")  # never ended: a transaction for each id would take twice the time

    def add(self, custom_id: str) -> bool:
        """Add an id; return whether it is new."""
        return self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (_digest(custom_id),)).rowcount == 1

    def __contains__(self, custom_id: str) -> bool:
        found = self._database.execute("SELECT 1 FROM ids WHERE id = ?", (_digest(custom_id),)).fetchone()
        return found is not None

    def close(self) -> None:
        self._database.close()


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
