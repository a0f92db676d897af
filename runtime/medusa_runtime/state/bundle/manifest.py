"""The manifest of a state bundle: which artifacts there are, what they are valid for, and their checksums.

``manifest.json``: ``{"schema": 1, "files": […], "artifacts": [{"kind", "key", "sha256", "size", "inline"?}, …],
"mark"?, "signature"?: {"key", "value"}}``. A blob is in ``blobs/<sha256>``. A small one is also in the manifest
(``inline``, base64), which saves a round trip. Mark (``own_mark.py``) and signature cover the rest of the manifest.
Unknown fields and kinds are ignored, so the schema number changes only if old readers would misread the file.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import StateError

if TYPE_CHECKING:
    from .signing import Signer

SCHEMA = 1
_MOST_ARTIFACTS = 1000  # each may be read, and has a line in the log if it is malformed
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KIND = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


class Artifact(NamedTuple):
    """An artifact in the manifest.

    ``key`` has the facts for which it is valid. ``inline`` is the blob itself, if the manifest contains it.
    """

    kind: str
    key: dict[str, str]
    sha256: str
    size: int
    inline: bytes | None = None


class Signature(NamedTuple):
    """An unchecked signature: the public key (``ed25519:<base64>``), the signature itself, and the signed message."""

    key: str
    value: bytes
    message: bytes


class Mark(NamedTuple):
    """An unchecked mark of the user who made the manifest, and the marked message."""

    value: str
    message: bytes


class Manifest(NamedTuple):
    """A manifest.

    ``files`` are the names of the checkpoint's small files, if they are known. ``rejected`` has malformed entries, each
    with the reason. ``signature`` and ``mark`` are not checked here, but in ``trust.py``.
    """

    artifacts: tuple[Artifact, ...]
    files: tuple[str, ...] | None = None
    rejected: tuple[tuple[str, str], ...] = ()
    signature: Signature | None = None
    mark: Mark | None = None

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        """Parse a manifest. Raises StateError for any other text, or another schema."""
        try:
            document = json.loads(text)
            schema = document["schema"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise StateError(
                f"manifest.json: expected a JSON object with a schema, found {len(text)} bytes of something else; "
                "materialize again"
            ) from None
        if type(schema) is not int or schema != SCHEMA:
            raise StateError(
                f"manifest.json: expected schema {SCHEMA}, found {schema!r:.80}; materialize again with this version "
                "of medusa-runtime, or run the one that wrote it"
            )
        entries, files = document.get("artifacts"), document.get("files")
        if not isinstance(entries, list):
            raise StateError("manifest.json: expected a list of artifacts; materialize again")
        if len(entries) > _MOST_ARTIFACTS:
            raise StateError(
                f"manifest.json: expected at most {_MOST_ARTIFACTS:,} artifacts, found {len(entries):,}; remove the "
                "bundle and materialize again"
            )
        artifacts, rejected = [], []
        for raw in entries:
            try:
                artifacts.append(_artifact(raw))
            except (ValueError, KeyError, TypeError) as error:
                kind = raw.get("kind") if isinstance(raw, dict) else raw
                rejected.append((str(kind)[:60], f"its entry in the manifest is malformed: {error}"))
        names = None
        if isinstance(files, list) and all(isinstance(name, str) for name in files):
            names = tuple(files)
        return cls(tuple(artifacts), names, tuple(rejected), _signature(document), _mark(document))

    def to_json(self, signer: Signer | None = None, make_mark: Callable[[bytes], str] | None = None) -> bytes:
        """Return the file's text, signed if there is a signer, and marked if there is ``make_mark``."""
        document: dict[str, Any] = {"schema": SCHEMA}
        if self.files is not None:
            document["files"] = self.files
        document["artifacts"] = [_document(artifact) for artifact in self.artifacts]
        if make_mark is not None:
            document["mark"] = make_mark(_message(document))
        if signer is not None:
            value = base64.b64encode(signer.sign(_message(document))).decode()
            document["signature"] = {"key": signer.public, "value": value}
        return json.dumps(document, indent=1).encode()

    def of_kind(self, kind: str) -> Sequence[Artifact]:
        return [artifact for artifact in self.artifacts if artifact.kind == kind]


def _message(document: dict[str, Any]) -> bytes:
    """Return the message that is signed and marked: the manifest without signature and mark, in a canonical form."""
    rest = {name: value for name, value in document.items() if name not in ("signature", "mark")}
    return b"medusa state bundle\n" + json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()


def _signature(document: dict[str, Any]) -> Signature | None:
    """Read the signature; None if there is none, or it is malformed."""
    raw = document.get("signature")
    if not isinstance(raw, dict) or not isinstance(raw.get("key"), str) or not isinstance(raw.get("value"), str):
        return None
    try:
        return Signature(raw["key"], base64.b64decode(raw["value"], validate=True), _message(document))
    except (ValueError, RecursionError):
        return None


def _mark(document: dict[str, Any]) -> Mark | None:
    raw = document.get("mark")
    try:
        return Mark(raw, _message(document)) if isinstance(raw, str) and raw.isascii() else None
    except RecursionError:
        return None


def _artifact(raw: Any) -> Artifact:
    if not isinstance(raw, dict):
        raise TypeError("expected an object")
    kind, key, digest, size = raw["kind"], raw["key"], raw["sha256"], raw["size"]
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ValueError("expected a kind of small letters")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):  # it becomes a path
        raise ValueError(f"expected 64 hexadecimal digits as sha256, found {str(digest)[:80]!r}")
    if type(size) is not int or size < 0:
        raise ValueError(f"expected a size in bytes, found {size!r:.80}")
    if not isinstance(key, dict) or not all(isinstance(value, str) and value.isprintable() for value in key.values()):
        raise ValueError("expected a key of names and printable values")
    inline = raw.get("inline")
    if inline is not None:
        try:
            inline = base64.b64decode(inline, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ValueError("expected base64 as inline blob") from None
    return Artifact(kind, key, digest, size, inline)


def _document(artifact: Artifact) -> dict[str, Any]:
    document: dict[str, Any] = artifact._asdict()
    del document["inline"]
    if artifact.inline is not None:
        document["inline"] = base64.b64encode(artifact.inline).decode()
    return document


__all__ = ["SCHEMA", "Artifact", "Manifest", "Mark", "Signature"]
