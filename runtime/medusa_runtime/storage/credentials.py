"""Credentials for the stores behind fsspec: how messages name them, and a quick look for Google's."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

_NAMED = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS with the path of a key file, `gcloud auth application-default login`, or the "
    "machine's service account",
    "az": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
    "AZURE_STORAGE_SAS_TOKEN",
}
_NAMED |= {"gcs": _NAMED["gs"], "abfs": _NAMED["az"], "abfss": _NAMED["az"]}
_GOOGLES = (  # variables that name credentials, or a metadata server or a store of one's own
    "GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT",
    "STORAGE_EMULATOR_HOST",
)  # fmt: skip
_METADATA_SERVER = ("169.254.169.254", 80)
_METADATA_S = 3.0  # as long as Google's own library waits for one answer


def credentials_hint(scheme: str) -> str:
    """Return where credentials of this scheme are expected, as the end of a message; empty if that is not known."""
    return f" in {_NAMED[scheme]}" if scheme in _NAMED else ""


def google_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the options with which gcsfs is opened: without a signature where nothing can give credentials.

    gcsfs itself asks Google's metadata server for them again and again, for a minute where packets are lost. In a pod
    of GKE the server may still refuse connections while it starts, so this decides nothing there.
    """
    if any(environ.get(name) for name in _GOOGLES) or any(place.exists() for place in _files(environ)):
        return {}
    try:
        with socket.create_connection(_METADATA_SERVER, _METADATA_S):
            return {}
    except OSError as error:
        is_starting = isinstance(error, ConnectionRefusedError) and "KUBERNETES_SERVICE_HOST" in environ
        return {} if is_starting else {"token": "anon"}


def _files(environ: Mapping[str, str]) -> list[Path]:
    """Return where gcloud and gcsfs keep what a user has logged in with."""
    home = Path(os.path.expanduser("~"))
    gcloud = environ.get("CLOUDSDK_CONFIG") or home / ".config/gcloud"
    return [Path(gcloud, "application_default_credentials.json"), home / ".gcs_tokens"]
