"""A deployed model as users describe it, and its form in JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from medusa_runtime.config import OPTIONS, Settings, parse_option
from medusa_runtime.errors import ConfigError
from medusa_runtime.registry import engine_kind, imported, is_remote

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_INSTANCES = 10_000
_WEIGHTS = (0.01, 100.0)
_LEAST_TOKENS = 2048  # of keys and values that an instance should have room for, if no length is asked for

Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("auto", "cpu", "cuda")
# Settings of `medusa serve` that the node server chooses, so a deployment cannot.
_OURS = ("model", "engine", "host", "port", "node_socket", "node_user", "served_model_name", "token", "platform")


# The engine of a deployment → the engine of its workers, when a group of them shares the model.
GROUP_ENGINES = {"torch": "group", "vllm": "vllm-group"}
GPU_GROUP_ENGINES = ("torch",)  # whose workers can compute on GPUs
_OF_WHOLE_MODELS = ("lora_modules", "allow_lora")  # settings that only an instance with the whole model supports


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model that the cluster serves under a name.

    ``url`` is the checkpoint's, or an absolute path. ``min`` and ``max`` bound the number of instances. ``ttft_slo_s``
    and ``tpot_slo_s`` are the wanted seconds to the first token and per output token; None means no wish. With
    ``live_scaling``, an instance that is added under load helps another one while its own layers arrive; with a TTFT
    SLO, only where that needs it. With ``disaggregated``, prefill and decode are on instances of their own, and ``min``
    and ``max`` count each. Instances start on nodes of ``device_kind``, or of any kind if it is empty. ``weight`` is
    that of the model's share when the cluster is full. ``settings`` are options of ``medusa serve`` as text, by field
    name.
    """

    name: str
    url: str
    engine: str = "torch"
    min: int = 0
    max: int = 1
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    live_scaling: bool = False
    disaggregated: bool = False
    device_kind: str = ""
    weight: float = 1.0
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any], *, settings_name: str = "settings") -> Deployment:
        """Read a deployment from JSON. Raises ConfigError for the first value that cannot be right.

        ``settings_name`` is what an error calls ``settings``.
        """
        unknown = found.keys() - {item.name for item in fields(cls)}
        if unknown:
            raise ConfigError(f"a deployment has no {', '.join(sorted(unknown))}")
        missing = {"name", "url"} - found.keys()
        if missing:
            raise ConfigError(f"expected a deployment with name and url, found none for {', '.join(sorted(missing))}")
        made = cls(**found)
        made._check(settings_name)
        return made

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def digest(self) -> str:
        """A short hash of the settings with which instances are started. If it changes, they are replaced."""
        started_with = (self.url, self.engine, dict(self.settings), self.disaggregated)
        return hashlib.sha256(json.dumps(started_with, sort_keys=True).encode()).hexdigest()[:16]

    def _check(self, settings_name: str) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"name: expected up to 64 letters, digits and . _ -, found {self.name!r}")
        if not isinstance(self.url, str) or not self.url:
            raise ConfigError(f"model: expected a checkpoint's URL or absolute path, found {self.url!r}")
        if self.engine in GROUP_ENGINES.values():
            whole = next(name for name, of_group in GROUP_ENGINES.items() if of_group == self.engine)
            raise ConfigError(f"engine: expected {whole}, of whose workers a group is made, found {self.engine!r}")
        if not isinstance(self.engine, str) or not self.engine.isidentifier():
            raise ConfigError(f"engine: expected an engine's name such as torch, found {self.engine!r}")
        if is_remote(self.engine):
            raise ConfigError(f"engine: expected one that runs the model itself, such as torch, found {self.engine!r}")
        for name, count in (("min", self.min), ("max", self.max)):
            if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MOST_INSTANCES:
                raise ConfigError(f"{name}: expected a number from 0 to {_MOST_INSTANCES}, found {count!r}")
        if self.min > self.max:
            raise ConfigError(f"expected min up to max, found min {self.min} and max {self.max}")
        for name, seconds in (("ttft_slo_s", self.ttft_slo_s), ("tpot_slo_s", self.tpot_slo_s)):
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < 1e300
            if seconds is not None and not number:
                raise ConfigError(f"{name}: expected seconds above 0, found {seconds!r}")
        number = isinstance(self.weight, int | float) and not isinstance(self.weight, bool)
        least, most = _WEIGHTS
        if not number or not least <= self.weight <= most:
            raise ConfigError(f"weight: expected a number from {least:g} to {most:g}, found {self.weight!r}")
        self.environment(settings_name)
        if not isinstance(self.device_kind, str) or not (self.device_kind == "" or _NAME.fullmatch(self.device_kind)):
            raise ConfigError(f"device_kind: expected up to 64 letters, digits and . _ -, found {self.device_kind!r}")
        for name, wanted in (("live_scaling", self.live_scaling), ("disaggregated", self.disaggregated)):
            if not isinstance(wanted, bool):
                raise ConfigError(f"{name}: expected true or false, found {wanted!r}")
            if wanted and not (self.engine == "torch" and self.may_be_shared()):
                found = f"the engine {self.engine}" + (" and adapters" if self.adapters() else "")
                raise ConfigError(f"{name}: expected the engine torch without adapters, found {found}")

    @property
    def device(self) -> Device:
        """What the instances compute on."""
        given = self.settings.get("device")
        return "cpu" if given == "cpu" else "cuda" if given == "cuda" else "auto"

    @property
    def gpus(self) -> int:
        """How many GPUs an instance shares its layers among, where it uses any."""
        return int(self.settings.get("tensor_parallel", 1)) if self.engine == "vllm" else 1

    def kv_bytes(self, token_bytes: int) -> int:
        """Return the least keys and values that an instance should have room for, by those of a token."""
        if "kv_cache_mb" in self.settings:
            return int(self.settings["kv_cache_mb"]) << 20
        return int(self.settings.get("max_model_len", _LEAST_TOKENS)) * token_bytes

    def adapters(self) -> dict[str, str]:
        """Return the URLs of the deployment's LoRA adapters, by the names under which requests ask for them."""
        return adapters_of(self.engine, self.settings)

    def may_be_shared(self) -> bool:
        """Return whether a group of workers can answer every request that this deployment accepts."""
        settings = self.settings
        if self.engine not in GROUP_ENGINES or any(settings.get(name) for name in _OF_WHOLE_MODELS):
            return False
        suffices = engine_kind(GROUP_ENGINES[self.engine]).http  # only medusa's routes answer from a group
        try:
            one_process = int(settings.get("tensor_parallel", 1)) == 1
            return one_process and (not suffices or imported(suffices)(Settings(vllm_args=settings.get("vllm_args"))))
        except (ConfigError, ValueError):
            return False

    def environment(self, settings_name: str = "settings") -> dict[str, str]:
        """Return the settings as environment variables of ``medusa serve``.

        Raises ConfigError, which calls them ``settings_name``, for a setting that is unknown or has a bad value.
        """
        if not isinstance(self.settings, Mapping):
            raise ConfigError(f"{settings_name}: expected names and values, found {self.settings!r}")
        options = {option.field: option for option in OPTIONS if option.field not in _OURS}
        found = {}
        for name, value in self.settings.items():
            if name in _OURS:
                raise ConfigError(
                    f"{settings_name}: {name} is chosen for each instance by its node; expected another option"
                )
            if name == "handler":  # gateways have only the model's own routes
                raise ConfigError(
                    f"{settings_name}: handler: a deployment serves its model alone; expected a function that has it "
                    "for its engine: medusa serve --engine cluster --handler FILE.py:NAME"
                )
            if name not in options:
                raise ConfigError(
                    f"{settings_name}: expected an option of medusa serve such as max_concurrency, found {name!r}"
                )
            text = str(value)
            if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):  # JSON can have a lone surrogate
                raise ConfigError(
                    f"{settings_name}: {name}: expected text that a process can be given, found {text[:100]!r}"
                )
            parse_option(options[name], text, f"{settings_name}: {name}")
            found[options[name].variable] = text
        return found


def adapters_of(engine: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the URLs of a deployment's LoRA adapters, by name. Empty if its instances will refuse the settings."""
    adapter_settings = Settings(lora_modules=settings.get("lora_modules"), vllm_args=settings.get("vllm_args"))
    if not adapter_settings.lora_modules and not adapter_settings.vllm_args:
        return {}
    try:
        target = engine_kind(engine).adapters
        return dict(imported(target)(adapter_settings)) if target else {}
    except (ConfigError, ValueError):
        return {}
