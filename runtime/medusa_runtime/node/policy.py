"""Who may have which model, and how much memory the models below a prefix may take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import NodeRefusedError
from ..storage.base import redacted
from .peer import Peer
from .settings import Allowed


def below(key: str, prefix: str) -> bool:
    """Whether a model lies below a prefix; ``s3://b/team`` does not hold ``s3://b/team-b/m``."""
    stem = prefix.rstrip("/")
    return prefix == "*" or key == stem or key.startswith(stem + "/")


class Policy:
    """Without rules everything may be had. A model that several rules fit is allowed if one of them allows it."""

    def __init__(self, allow: Iterable[Allowed], quota: Mapping[str, int]) -> None:
        self._allow = tuple(allow)
        self._quota = dict(quota)

    def check(self, key: str, peer: Peer) -> None:
        """Raises NodeRefusedError when this user may not have this model."""
        if not self._allow:
            return
        fitting = [rule for rule in self._allow if below(key, rule.prefix)]
        if any(rule.users is None or peer.uid in rule.users for rule in fitting):
            return
        wanted = "a model below " + " or ".join(rule.prefix for rule in self._allow) if not fitting else "another user"
        raise NodeRefusedError(
            f"{redacted(key)} may not be had by user {peer.uid} through the node agent; expected {wanted} (--allow)"
        )

    def quotas(self, key: str) -> list[tuple[str, int]]:
        """The prefixes that hold this model, with their bytes."""
        return [(prefix, size) for prefix, size in self._quota.items() if below(key, prefix)]
