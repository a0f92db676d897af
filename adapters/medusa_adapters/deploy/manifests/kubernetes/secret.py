"""A Kubernetes Secret as environment variables: all of its entries, or one of them under a name of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from medusa_runtime.errors import ConfigError

from .. import values

_ENTRY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
FORM = "SECRET or VARIABLE=SECRET/KEY"


class Secret(NamedTuple):
    """A Secret. ``key`` and ``variable`` are None if every entry becomes the variable of its own name."""

    name: str
    key: str | None = None
    variable: str | None = None


def parse_secret(text: str, flag: str) -> Secret:
    """Parse ``SECRET`` or ``VARIABLE=SECRET/KEY``. Raises ConfigError, which names the flag."""
    variable, sign, rest = text.rpartition("=")
    if not sign:
        return Secret(values.subdomain(text, flag))
    name, slash, key = rest.partition("/")
    if not slash or not _ENTRY.fullmatch(key) or not values.is_variable(variable):
        raise ConfigError(f"{flag}={text!r} cannot be used: expected {FORM}, e.g. HF_TOKEN=hub/token")
    return Secret(values.subdomain(name, flag), key, variable)


def sources(secrets: Sequence[Secret]) -> list[dict[str, Any]]:
    """Return a container's ``envFrom``: the secrets of which all entries are used."""
    return [{"secretRef": {"name": found.name}} for found in secrets if found.key is None]


def environment(variables: Mapping[str, str], secrets: Sequence[Secret]) -> list[dict[str, Any]]:
    """Return a container's ``env``: plain variables, and the secrets of which one entry is used."""
    entries = [
        {"name": found.variable, "valueFrom": {"secretKeyRef": {"name": found.name, "key": found.key}}}
        for found in secrets
        if found.key is not None
    ]
    return [*({"name": name, "value": value} for name, value in variables.items()), *entries]
