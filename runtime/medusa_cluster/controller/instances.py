"""The instances that the controller knows, by id and by node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from .nodes import KnownInstance

_REQUIRED = object()


class Instances(dict[str, KnownInstance]):
    """Instances by id. ``on`` finds those of one node without a look at all the others.

    Change it by ``[]``, ``del`` and ``pop`` only. The node of an instance never changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_node: defaultdict[str, dict[str, KnownInstance]] = defaultdict(dict)

    def on(self, node: str) -> Collection[KnownInstance]:
        """Return the instances of a node, in the order in which they became known."""
        return self._by_node[node].values() if node in self._by_node else ()

    def __setitem__(self, key: str, instance: KnownInstance) -> None:
        if key in self:
            del self[key]
        super().__setitem__(key, instance)
        self._by_node[instance.node][key] = instance

    def __delitem__(self, key: str) -> None:
        node = self[key].node
        super().__delitem__(key)
        del self._by_node[node][key]
        if not self._by_node[node]:
            del self._by_node[node]

    def pop(self, key: str, default: Any = _REQUIRED) -> Any:
        if key not in self and default is not _REQUIRED:
            return default
        found = self[key]
        del self[key]
        return found
