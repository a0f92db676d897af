"""Nodes' and gateways' reports: they are checked before the controller keeps them, and gateways' loads are summed.

A decision is about all nodes at once, so a single unusable report would stop all decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from medusa_runtime.errors import ClusterError, ConfigError, json_excerpt

from ..deployment import DEVICES
from ..policy import state as policy
from .nodes import Gateway

_LARGEST = 1e18
_MOST_MODELS = 100_000

Check = Callable[[Any], bool]


def node_status(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a node's status unchanged. Raises ClusterError if a value is missing or has another type."""
    for name, check in _STATUS.items():
        if name in found and not check(found[name]):
            raise ClusterError(f"expected the status of a node, found {name} of {json_excerpt(found[name])}")
    return found


def loads_of(found: Any) -> dict[str, dict[str, float]]:
    """Return a gateway's loads unchanged: model → name → number. Raises ConfigError if they are something else."""
    if isinstance(found, dict) and len(found) <= _MOST_MODELS:
        loads: dict[str, dict[str, float]] = found
        if all(isinstance(load, dict) and all(map(_number, load.values())) for load in loads.values()):
            return loads
    raise ConfigError(f"report: expected loads of numbers by model, found {json_excerpt(found)}")


def log_sizes(found: Any, node: str) -> Mapping[str, int]:
    """Return the bytes of a node's logs by their names, unchanged. Raises ClusterError if it is something else."""
    if not _SIZES(found):
        raise ClusterError(f"expected the names of logs and their bytes from {node}, found {json_excerpt(found)}")
    sizes: dict[str, int] = found
    return sizes


def log_text(found: Any, node: str, log: str) -> Mapping[str, Any]:
    """Return a part of a log unchanged: its text, start and end. Raises ClusterError if it is something else."""
    if not _LOG_TEXT(found):
        raise ClusterError(f"expected text, start and end of {log} from {node}, found {json_excerpt(found)}")
    part: dict[str, Any] = found
    return part


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _text_or_none(value: Any) -> bool:
    return value is None or _text(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < _LARGEST


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_number, value))


def _speed(value: Any) -> bool:
    return _number(value) and value > 0


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _by_name(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _objects(required: Mapping[str, Check], optional: Mapping[str, Check]) -> Check:
    one = _object(required, optional)
    return lambda value: isinstance(value, list | tuple) and all(map(one, value))


def _object(required: Mapping[str, Check], optional: Mapping[str, Check]) -> Check:
    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and all(name in value and known(value[name]) for name, known in required.items())
            and all(name not in value or known(value[name]) for name, known in optional.items())
        )

    return check


_SIZES = _by_name(_count)
_LOG_TEXT = _object({"text": _text, "start": _count, "end": _count}, {})
_LAYERS: Check = lambda value: (  # noqa: E731
    value is None or (_text(value) and (not value or all(part.isdecimal() for part in value.split(":", 1))))
)
_GROUP = _object(
    {"id": _text, "rank": _number, "full": _number, "size": _number},
    {"layers": _LAYERS, "state": _text, "keep": _number},
)
_MEETS = _object({"group": _text, "at": _text}, {})
_PAIR = _object(
    {
        "helping": lambda value: isinstance(value, bool),
        "prefills": lambda value: isinstance(value, bool),
        "lost": lambda value: isinstance(value, bool),
        "role": lambda value: value in ("both", "prefill", "decode"),
        "helps": _text_or_none,
        "meets": lambda value: value is None or _MEETS(value),
    },
    {},
)
_START = _by_name(lambda value: value is None or _number(value) or _text(value))
_STATUS: dict[str, Check] = {
    **dict.fromkeys(("name", "address", "url", "leaf", "state", "device_kind", "device_name"), _text),
    **dict.fromkeys(
        ("egress_bytes_per_s", "ingress_bytes_per_s", "memory_bytes", "memory_used_bytes", "devices"), _number
    ),
    **dict.fromkeys(("device_bytes", "devices_lost"), _number),
    **dict.fromkeys(("device_sizes", "device_free_bytes", "device_free_sizes"), _numbers),
    **dict.fromkeys(("link_bytes_per_s", "load_bytes_per_s"), _speed),
    "pace_bytes_per_s": lambda value: value is None or _speed(value),
    "failed_fetches": _by_name(_text),
    **dict.fromkeys(("head", "devices_apart"), lambda value: isinstance(value, bool)),
    "models": _objects(
        {"url": _text, "state": _text, "total_bytes": _number, "fetched_bytes": _number, "pinned": _number},
        {
            "version": _text_or_none,
            "idle_s": _number,
            "bytes_per_s": _number,
            "sources": _texts,
            "received_bytes": _by_name(_number),
            "excluded": _by_name(_text),
        },
    ),
    "instances": _objects(
        {"id": _text, "model": _text, "state": _text, "age_s": _number},
        {
            "running": _number,
            "kv_use": lambda value: _number(value) and value <= 1,
            "prefill_tokens_per_s": _number,
            "version": _text_or_none,
            "deployment": _text,
            "url": _text,
            "answers": lambda value: isinstance(value, bool),
            "group": lambda value: not value or _GROUP(value),
            "pair": lambda value: not value or _PAIR(value),
            "gpus": _number,
            "device": lambda value: value in DEVICES,
            "start": lambda value: not value or _START(value),
        },
    ),
}

__all__ = ["Loads", "loads_of", "log_sizes", "log_text", "node_status"]


_SUMMED = ("waiting", "running", "tokens_per_s", "unanswered_tokens", "prefilled_per_s", "decoded_per_s")
_GATEWAY_GONE_S = 2.0  # the loads of a gateway without a report for so long no longer count


class Loads:
    """The gateways' loads, summed by model, with the time of each model's last request."""

    def __init__(self) -> None:
        self._last_request: dict[str, float] = {}

    def keep(self, deployed: Container[str]) -> None:
        """Forget all models but these."""
        self._last_request = {model: at for model, at in self._last_request.items() if model in deployed}

    def summed(self, gateways: Iterable[Gateway], now: float, deployed: Container[str]) -> dict[str, policy.Load]:
        """Return the loads of the ``deployed`` models, by name."""
        sums: dict[str, dict[str, float]] = {model: {} for model in self._last_request}
        for gateway in gateways:
            if now - gateway.seen_at > _GATEWAY_GONE_S:
                continue
            for model, load in gateway.loads.items():
                if model not in deployed:
                    continue
                total = sums.setdefault(model, {})
                for name in _SUMMED:
                    total[name] = total.get(name, 0.0) + float(load.get(name) or 0)
                longest_wait_s = float(load.get("longest_wait_s") or 0)
                total["longest_wait_s"] = max(total.get("longest_wait_s", 0.0), longest_wait_s)
                if load.get("waiting") or load.get("running") or load.get("decoded_per_s"):
                    self._last_request[model] = now
        return {
            model: policy.Load(
                waiting=int(total.get("waiting", 0)),
                running=int(total.get("running", 0)),
                tokens_per_s=total.get("tokens_per_s", 0.0),
                unanswered_tokens=total.get("unanswered_tokens", 0.0),
                prefilled_per_s=total.get("prefilled_per_s", 0.0),
                decoded_per_s=total.get("decoded_per_s", 0.0),
                longest_wait_s=total.get("longest_wait_s", 0.0),
                last_request_s=self._last_request.get(model, -math.inf),
            )
            for model, total in sums.items()
        }
