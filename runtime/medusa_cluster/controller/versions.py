"""The current version of each model, which is the one that appeared last."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

_KEPT = 8


class Versions:
    """The versions of each model, in the order of their first appearance.

    When a store's objects are replaced, an agent notices and fetches them again. So a version that appears for the
    first time is newer than all others, and a node that comes back with an older one is recognized.
    """

    def __init__(self, seen: Mapping[str, Iterable[str]]) -> None:
        self._seen = {url: list(versions) for url, versions in seen.items()}

    def see(self, models: Iterable[Mapping[str, Any]], deployed: Collection[str]) -> bool:
        """Note the versions that a node shows. Return whether one of them is new.

        ``deployed`` are the URLs of deployed models; all others are forgotten.
        """
        new = False
        for model in models:
            url, version = str(model["url"]), str(model.get("version", ""))
            if url in deployed and version and version not in self._seen.get(url, ()):
                self._seen[url] = [*self._seen.get(url, ()), version][-_KEPT:]
                new = True
        for url in self._seen.keys() - set(deployed):
            del self._seen[url]
        return new

    def current(self, url: str, copies: Iterable[Mapping[str, Any]]) -> str:
        """Return the newest version among a model's copies, or an empty string."""
        there = {str(copy.get("version", "")) for copy in copies}
        return next((version for version in reversed(self._seen.get(url, ())) if version in there), "")

    def to_json(self) -> dict[str, list[str]]:
        return {url: list(versions) for url, versions in self._seen.items()}
