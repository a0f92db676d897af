"""The agent's policy: which caller may have which model, where a fetch may be redirected, and memory by prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...errors import NodeRefusedError
from ...storage.base import redacted, scheme_of
from ...storage.canonical_urls import canonical_url, is_below
from ..settings import AllowRule
from .peer import Caller


def is_below_prefix(key: str, prefix: str) -> bool:
    """Return whether a model is below a prefix, however the prefix is spelled. Everything is below ``*``."""
    return prefix == "*" or is_below(key, prefix)


class Policy:
    """The rules of ``--allow`` and of tenants' sockets. If in doubt, a model is refused.

    A tenant's socket gives the models below its prefixes to every process that can open it. On other sockets,
    ``--allow`` decides. If several rules fit a model, it is enough that one of them allows it.

    Without ``--allow``, a model in a store is only for the agent's own user, because it is fetched with the agent's
    credentials and from the agent's place in the network. A local model is for every user, because its files are read
    with the caller's rights. With ``--allow``, every model needs a rule, local ones too.
    """

    def __init__(
        self, allow: Iterable[AllowRule], quota: Mapping[str, int], tenants: Iterable[Sequence[str]] = ()
    ) -> None:
        """``tenants`` has the prefixes of each tenant's socket. ``quota`` has limits in bytes, by prefix."""
        self._allow = tuple(allow)
        self._open_prefixes = [rule.prefix for rule in self._allow] + [
            prefix for prefixes in tenants for prefix in prefixes
        ]
        self._quota = dict(quota)

    def check(self, key: str, caller: Caller) -> None:
        """Raise NodeRefusedError if this caller may not have this model."""
        user = caller.peer.uid
        if caller.prefixes:
            if not any(is_below_prefix(key, prefix) for prefix in caller.prefixes):
                raise NodeRefusedError(
                    f"{redacted(key)} is not served on {caller.socket}; expected "
                    f"{_describe_prefixes(caller.prefixes)} (--socket)"
                )
        elif not self._allow:
            if scheme_of(key) and not caller.trusted:
                raise NodeRefusedError(
                    f"{redacted(key)} may not be had by user {user}{_container(caller)} through the node agent: "
                    f"without --allow it fetches for its own user alone; to open it, start it with "
                    f"--allow PREFIX={user}, or with a socket for this caller, --socket PATH=PREFIX"
                )
        else:
            fitting = [rule for rule in self._allow if is_below_prefix(key, rule.prefix)]
            if not any(rule.users is None or user in rule.users for rule in fitting):
                wanted = "another user" if fitting else _describe_prefixes([rule.prefix for rule in self._allow])
                raise NodeRefusedError(
                    f"{redacted(key)} may not be had by user {user} through the node agent; expected {wanted} (--allow)"
                )

    @property
    def serves_others(self) -> bool:
        """Whether a rule opens models of stores to other users than the agent's own."""
        return bool(self._open_prefixes)

    def allows_redirect(self, url: str) -> bool:
        """Return whether a store may send a fetch to this URL on another host.

        An agent that fetches only for its own user follows every redirect. One that serves other users follows only
        those to a URL below a prefix that a rule has opened, since it fetches from its own place in the network.
        """
        place = canonical_url(url.partition("?")[0])
        return not self._open_prefixes or (
            place is not None and any(is_below_prefix(place, prefix) for prefix in self._open_prefixes)
        )

    def quotas(self, key: str) -> list[tuple[str, int]]:
        """Return the prefixes that hold this model, with their limits in bytes."""
        return [(prefix, size) for prefix, size in self._quota.items() if is_below_prefix(key, prefix)]


def _describe_prefixes(prefixes: Iterable[str]) -> str:
    return "a model below " + " or ".join(redacted(prefix) for prefix in prefixes)


def _container(caller: Caller) -> str:
    return "" if caller.peer.same_pid_namespace else " of another container"
