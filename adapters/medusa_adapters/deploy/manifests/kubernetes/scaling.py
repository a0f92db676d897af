"""Knative's autoscaling annotations, from what a cold start was measured to cost.

The faster a start, the sooner an instance may end and the fuller it may run: if a start takes 300 ms, requests can wait
for it, and no instance has to stay warm. Each rule is one line below; docs/deploy.md has the table.
"""

from __future__ import annotations

import math

from ..measured import MeasuredStart

PREFIX = "autoscaling.knative.dev/"
_PROGRESS = "serving.knative.dev/progress-deadline"
_LEAST_WINDOW_S, _MOST_WINDOW_S = 20, 3600  # Knative accepts 6 s to 1 h
_MOST_RETENTION_S = 3600
_LEAST_PROGRESS_S = 600
_STARTS = 10  # an average over ten starts is not moved by the load that queued during one


def scale(measured: MeasuredStart | None, *, concurrency: int, min_scale: int, max_scale: int) -> dict[str, str]:
    """Return the annotations, whose values are strings. Without a measurement, Knative's defaults stay."""
    found = {
        PREFIX + "class": "kpa.autoscaling.knative.dev",
        PREFIX + "metric": "concurrency",
        PREFIX + "target": str(concurrency),
        PREFIX + "min-scale": str(min_scale),
        PREFIX + "max-scale": str(max_scale),
    }
    if measured is None:
        return found
    start_s, answer_s = measured.cold_start_s, measured.answer_s
    window_s = min(max(math.ceil(_STARTS * start_s), _LEAST_WINDOW_S), _MOST_WINDOW_S)
    retention_s = min(math.ceil(_STARTS * answer_s), _MOST_RETENTION_S)
    return found | {
        # Load that grows while an instance starts must fit into the others' headroom.
        PREFIX + "target-utilization-percentage": str(round(min(max(85 - 3 * answer_s, 50), 85))),
        PREFIX + "window": f"{window_s}s",
        # Ending an instance pays once no request has come for ten times as long as a start takes.
        PREFIX + "scale-to-zero-pod-retention-period": f"{retention_s}s",
        PREFIX + "scale-down-delay": f"{math.ceil(start_s) if start_s >= 1 else 0}s",
        # -1 keeps the activator in the path, where a burst may wait; 0 spares the hop when starts are short
        PREFIX + "target-burst-capacity": "-1" if start_s >= 1 else "0",
        _PROGRESS: f"{max(_LEAST_PROGRESS_S, math.ceil(_STARTS * answer_s))}s",
    }
