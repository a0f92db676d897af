"""The interface of an adapter, and the choice of the one for the platform that this process runs on."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from medusa_handler.platform import Platform
    from medusa_runtime.config import Settings


class PlatformEntry(NamedTuple):
    """An adapter's module, and how its platform is recognized before the module is imported.

    One of the ``variables`` is set (a name with ``*`` at its end stands for all that begin so), or ``folder`` exists.
    """

    module: str
    variables: tuple[str, ...] = ()
    folder: str = ""

    def matches(self, environ: Mapping[str, str]) -> bool:
        for name in self.variables:
            if environ.get(name) or (name.endswith("*") and any(each.startswith(name[:-1]) for each in environ)):
                return True
        return bool(self.folder) and os.path.isdir(self.folder)


_LOCAL = "local"
_LONGEST_ID = 128  # in characters
# In the order in which they are looked for.
ADAPTERS = {
    "kserve": PlatformEntry("medusa_adapters.platforms.kserve", (), "/mnt/models"),
    "knative": PlatformEntry("medusa_adapters.platforms.knative", ("K_SERVICE", "K_REVISION")),
    "openfaas": PlatformEntry(
        "medusa_adapters.platforms.openfaas",
        (
            *("OPENFAAS_NAME", "OPENFAAS_NAMESPACE", "fprocess", "exec_timeout", "read_timeout", "write_timeout"),
            *("max_inflight", "healthcheck_interval", "ready_path", "suppress_lock"),
        ),
    ),
    "sagemaker": PlatformEntry("medusa_adapters.platforms.sagemaker", ("SAGEMAKER_*",), "/opt/ml/model"),
    "lambda": PlatformEntry("medusa_adapters.platforms.lambda_", ("AWS_LAMBDA_RUNTIME_API",)),
    _LOCAL: PlatformEntry("medusa_adapters.platforms.local"),
}


class PlatformAdapter(Protocol):
    """A module of this package; pure translation, and imports nothing heavy."""

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Translate the platform's own variables into ours (docs/environment.md).

        Raises ConfigError, which names the platform's variable.
        """

    def platform(self, settings: Settings, environ: Mapping[str, str]) -> Platform:
        """Return the platform's protocol. Called in the function process."""


def load(name: str) -> PlatformAdapter:
    return cast("PlatformAdapter", importlib.import_module(ADAPTERS[name].module))


def resolve(name: str, environ: Mapping[str, str]) -> str:
    """Return the platform's name; ``auto`` is resolved from the environment."""
    if name != "auto":
        return name
    return next((name for name, place in ADAPTERS.items() if place.matches(environ)), _LOCAL)


def request_id(headers: Mapping[str, str], name: str) -> str | None:
    """Return the id that a platform gives to a request in the header ``name``.

    It is None if it is missing, too long, or not printable ASCII.
    """
    value = headers.get(name, "")
    return value if value.isascii() and value.isprintable() and 0 < len(value) <= _LONGEST_ID else None
