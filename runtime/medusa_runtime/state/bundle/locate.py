"""Find a state bundle. Most checkpoints have none, and their start imports only this module of the package."""

from __future__ import annotations

import os

from ...checkpoint.reader import read_whole
from ...errors import CorruptError, ForbiddenError, ObjectNotFoundError, StateError
from ...storage.base import Store, open_store, redacted, scheme_of
from ...storage.local import LocalStore

FOLDER, MANIFEST, BLOBS = ".medusa", "manifest.json", "blobs"


def hold(store: Store, prefix: str) -> tuple[Store, str]:
    """Return the store and prefix by which to read a bundle: its open folder, if the store is a folder by its path.

    A path may lead through a folder of someone else, who could exchange links in it between the check of the bundle's
    place and its reading. The caller closes the store. Without such a folder, the arguments are returned.
    """
    if type(store) is not LocalStore:
        return store, prefix
    try:
        descriptor = os.open(store.local_path(prefix), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return store, prefix
    from .held_folder import HeldFolder  # most checkpoints have no bundle

    return HeldFolder(descriptor), ""


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


def open_bundle_store(url: str) -> Store:
    """Open the folder of a bundle that ``--state`` names. Raises what ``open_store`` does."""
    if scheme_of(url) not in ("", "file"):
        return open_store(url)
    return LocalStore(url, holds="a state bundle")


def missing_manifest(url: str, store: Store) -> StateError:
    """Return the error that ``--state`` names a folder without a bundle."""
    place, hint = redacted(url), "make it with medusa materialize --out"
    if read_manifest(store, f"{FOLDER}/") is not None:
        hint = f"did you mean {place.rstrip('/')}/{FOLDER}?"
    return StateError(f"expected a state bundle in {place}, found no {MANIFEST}; {hint}")
