"""Manifests as YAML text, with notes for the reader as comments above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medusa_runtime.errors import MissingPackageError


def text(documents: Sequence[Mapping[str, Any]], comments: Sequence[str] = ()) -> str:
    """Return YAML documents in the given order, with their keys in the given order."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingPackageError(
            'writing manifests needs an optional package: pip install "medusa-runtime[deploy]"'
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """A dumper without anchors: an object that occurs twice in Python is written twice."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    lines = "".join(f"# {line}".rstrip() + "\n" for comment in comments for line in comment.splitlines())
    bodies = [
        yaml.dump(dict(document), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
        for document in documents
    ]
    return lines + "---\n".join(bodies)
