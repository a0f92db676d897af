"""The load of each model: the gateways' reports, summed."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

from ..policy import state as policy
from .nodes import Gateway

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
