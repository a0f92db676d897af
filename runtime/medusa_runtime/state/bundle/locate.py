"""Find a state bundle. Most checkpoints have none, and their start imports only this module of the package."""

from __future__ import annotations

from ...checkpoint.reader import read_whole
from ...errors import CorruptError, ForbiddenError, ObjectNotFoundError, StateError
from ...storage.base import Store

FOLDER, MANIFEST, BLOBS = ".medusa", "manifest.json", "blobs"


def read_manifest(store: Store, prefix: str) -> bytes | None:
    """Read the manifest's text; None if there is no manifest.

    ``prefix`` is the bundle's folder in the store, empty or ending in a slash. Raises StateError or StorageError.
    """
    try:
        return read_whole(store.read, f"{prefix}{MANIFEST}")
    except ObjectNotFoundError:
        return None
    except ForbiddenError as error:
        if store.local_path(MANIFEST) is None:  # without the right to list objects, S3 says so where there is none
            return None
        raise StateError(str(error)) from None
    except CorruptError as error:
        raise StateError(str(error)) from None
