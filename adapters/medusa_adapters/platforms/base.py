"""The interface of an adapter, and the choice of the one for the platform that this process runs on."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from medusa_handler.platform import Platform
    from medusa_runtime.config import Settings

# In the order in which ``detect`` is called; the last one always says yes.
ADAPTERS = {
    "knative": "medusa_adapters.platforms.knative",
    "openfaas": "medusa_adapters.platforms.openfaas",
    "sagemaker": "medusa_adapters.platforms.sagemaker",
    "lambda": "medusa_adapters.platforms.lambda_",
    "local": "medusa_adapters.platforms.local",
}


class Adapter(Protocol):
    """A module of this package; pure translation, and imports nothing heavy."""

    def detect(self, environ: Mapping[str, str]) -> bool:
        """Whether the environment is this platform's."""

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Translate the platform's own variables into ours (docs/environment.md).

        Raises ConfigError, which names the platform's variable.
        """

    def platform(self, settings: Settings, environ: Mapping[str, str]) -> Platform:
        """The protocol. Called in the function process."""


def load(name: str) -> Adapter:
    return cast("Adapter", importlib.import_module(ADAPTERS[name]))


def resolve(name: str, environ: Mapping[str, str]) -> str:
    """The platform's name; ``auto`` is resolved from the environment."""
    if name != "auto":
        return name
    return next(name for name in ADAPTERS if load(name).detect(environ))
