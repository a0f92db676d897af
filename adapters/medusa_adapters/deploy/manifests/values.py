"""Checks of names, quantities and labels, as Kubernetes accepts them.

Each check returns its value if it is valid, and raises ConfigError, which names the flag and the expected form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from medusa_runtime.errors import ConfigError

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123
_SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035: a Service's name becomes a host name
_QUANTITY = re.compile(r"(\d+(\.\d+)?|\.\d+)(m|k|Ki|[MGTPE]i?|[eE][+-]?\d+)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_IMAGE = re.compile(
    r"[a-zA-Z0-9][a-zA-Z0-9.-]*(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_LONGEST = 63
_LONGEST_SUBDOMAIN = 253
_LARGEST = 2.0**63  # a Kubernetes quantity is kept as a whole number of 64 bits
_LEAST_MEMORY = 2**20
_SUFFIXES = {"m": 1e-3, "": 1.0, "k": 1e3} | {
    letter + binary: (1024.0 if binary else 1000.0) ** power
    for power, letter in enumerate("KMGTPE", 1)
    for binary in ("", "i")
}


def name(value: str) -> str:
    """Check a function's name: an RFC 1035 label, which all platforms accept."""
    if len(value) > _LONGEST or not _SERVICE.fullmatch(value):
        raise ConfigError(
            f"NAME={value!r} cannot be used: expected a lower-case letter, then letters, digits and '-', "
            f"at most {_LONGEST} characters"
        )
    return value


def namespace(value: str) -> str:
    """Check the name of a namespace: an RFC 1123 label."""
    if len(value) > _LONGEST or not _LABEL.fullmatch(value):
        raise ConfigError(
            f"--namespace={value!r} cannot be used: expected lower-case letters, digits and '-', "
            f"at most {_LONGEST} of them"
        )
    return value


def subdomain(value: str, flag: str) -> str:
    """Check the name of a secret, a service account or a runtime class: RFC 1123 labels with dots between them."""
    if len(value) > _LONGEST_SUBDOMAIN or not all(map(_LABEL.fullmatch, value.split("."))):
        raise ConfigError(
            f"{flag}={value!r} cannot be used: expected lower-case letters, digits, '-' and '.', "
            f"at most {_LONGEST_SUBDOMAIN} of them"
        )
    return value


def image(value: str | None, flag: str = "--image") -> str:
    """Check the name of an image, with or without registry, tag and digest."""
    if not value:
        raise ConfigError(f"{flag} is missing: expected the function's image, e.g. {flag} registry.example/fn:1")
    if not _IMAGE.fullmatch(value):
        raise ConfigError(f"{flag}={value!r} cannot be used: expected [registry/]name[:tag][@sha256:…]")
    return value


def quantity(value: str, flag: str) -> str:
    """Check a Kubernetes quantity above zero, such as ``500m``, ``2`` or ``4Gi``."""
    if not _QUANTITY.fullmatch(value) or not 0 < amount(value) < _LARGEST:
        raise ConfigError(f"{flag}={value!r} cannot be used: expected a quantity above 0 such as 500m, 2 or 4Gi")
    return value


def memory(value: str, flag: str) -> str:
    """Check a quantity of memory. A small bare number is refused: it would be bytes, but ``8`` is never meant so."""
    if not _QUANTITY.fullmatch(value) or not _LEAST_MEMORY <= amount(value) < _LARGEST:
        raise ConfigError(
            f"{flag}={value!r} cannot be used: expected at least 1Mi with a unit of Kubernetes, such as 512Mi or 8Gi"
        )
    return value


def amount(value: str) -> float:
    """Return a quantity as a number of bytes or CPUs."""
    match = re.fullmatch(r"([\d.]+(?:[eE][+-]?\d+)?)([A-Za-z]*)", value)
    assert match is not None, value
    return float(match[1]) * _SUFFIXES[match[2]]


def check_range(value: int | float, low: float, high: float, flag: str, unit: str = "") -> None:
    """Raise ConfigError for a number that is not between ``low`` and ``high``, both included."""
    if not low <= value <= high:
        raise ConfigError(f"{flag}={value:g} cannot be used: expected {low:g} to {high:g}{unit and ' ' + unit}")


def pairs(values: Sequence[str], flag: str) -> dict[str, str]:
    """Check ``KEY=VALUE`` flags for labels and node selectors."""
    found = {}
    for text in values:
        key, sign, value = text.partition("=")
        if not sign or not _KEY.fullmatch(key) or len(value) > _LONGEST or not _LABEL_VALUE.fullmatch(value):
            raise ConfigError(f"{flag}={text!r} cannot be used: expected key=value in the form of a Kubernetes label")
        found[key] = value
    return found


def annotation_pairs(values: Sequence[str]) -> dict[str, str]:
    """Return the annotations given with ``--annotation``. Their values may be any text."""
    found = {}
    for text in values:
        key, sign, value = text.partition("=")
        if not sign or not _KEY.fullmatch(key):
            raise ConfigError(f"--annotation={text!r} cannot be used: expected key=value, e.g. example.com/team=search")
        found[key] = value
    return found


def is_variable(text: str) -> bool:
    """Return whether an environment variable may have this name."""
    return _VARIABLE.fullmatch(text) is not None


def variables(values: Sequence[str], flag: str = "--env") -> dict[str, str]:
    """Return the variables given with a flag. An error's message omits the value, because it may be a secret."""
    found = {}
    for text in values:
        variable, sign, value = text.partition("=")
        if not sign or not is_variable(variable):
            found_text = repr(variable) if sign else "a text without '='"
            raise ConfigError(f"{flag} cannot be used: expected NAME=VALUE, found {found_text}")
        found[variable] = value
    return found
