"""/metrics: what this process counts, what the engine says, and where the cold start's time went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from medusa_runtime.errors import MedusaError

from ..metrics import gauge

if TYPE_CHECKING:
    from ..service import Service


def exposition(service: Service) -> str:
    """The whole page, in Prometheus' text format."""
    return "\n".join(_lines(service)) + "\n"


def _lines(service: Service) -> Iterator[str]:
    yield from service.metrics.lines()
    admission = service.admission
    yield from gauge("medusa_ready", "1 when requests can be answered.", ((), int(service.ready)))
    yield from gauge("medusa_requests_in_flight", "Requests let in and not yet answered.", ((), admission.in_flight))
    held = 0 if service.ready else admission.in_flight
    yield from gauge("medusa_requests_held", "Requests waiting for the function to be ready.", ((), held))
    yield from gauge("medusa_requests_refused_total", "Requests answered with 429.", ((), admission.refused))
    if service.region is not None:
        progress = service.region.progress()
        yield from gauge("medusa_fetched_bytes", "Bytes of weights in the region.", ((), progress.fetched_bytes))
        yield from gauge("medusa_weights_bytes", "Bytes of weights in all.", ((), progress.total_bytes))
    yield from _engine(service)
    seconds: dict[tuple[str, str], float] = {}
    for stage in service.timeline.stages():
        key = (stage.name, stage.process)
        seconds[key] = seconds.get(key, 0.0) + (stage.end_ns - stage.start_ns) / 1e9
    samples = [((("stage", name), ("process", process)), value) for (name, process), value in seconds.items()]
    yield from gauge("medusa_cold_start_stage_seconds", "Duration of each stage of this start.", *samples)


def _engine(service: Service) -> Iterator[str]:
    if service.engine is None:
        return
    try:
        stats = service.engine.stats()
    except MedusaError:  # it is being restarted; the rest of the page is still wanted
        return
    for name, value in stats.items():
        if isinstance(value, int | float):
            yield from gauge(f"medusa_engine_{name}", "From the engine.", ((), value * 1))  # a bool as 0 or 1
