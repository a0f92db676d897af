"""/metrics: the counters of this process, those of the engine, and the times of the cold start's stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from medusa_runtime import __version__
from medusa_runtime.engine.base import EXPOSITION
from medusa_runtime.errors import MedusaError
from medusa_runtime.liveness import ROLES
from medusa_runtime.prometheus import Labels, escape, gauge
from medusa_runtime.timeline import ready_at, window

if TYPE_CHECKING:
    from medusa_runtime.timeline import Stage

    from ..service import Service

_ENGINE_TEXTS = {
    "running": "Requests that the engine computes tokens for.",
    "waiting": "Requests that wait in the engine for room in a batch or in the KV cache.",
    "kv_tokens": "Tokens that the KV cache has room for.",
    "kv_tokens_used": "Tokens that the KV cache holds.",
    "prompt_tokens_total": "Tokens of prompts processed since the engine started.",
    "prefill_tokens_per_s": "The most tokens of prompts that a step has computed in a second.",
    "generated_tokens_total": "Tokens generated since the engine started.",
    "embeddings_total": "Texts turned into vectors since the engine started.",
    "cached_tokens_total": "Tokens of prompts that were found in the KV cache.",
    "preemptions_total": "Requests put back to wait because the KV cache was full.",
    "adapters": "LoRA adapters that the engine has.",
    "steps_total": "Forward passes since the engine started.",
    "cancelled_total": "Requests cancelled because their client had left.",
    "compilations_total": "Graphs compiled since the engine started; 0 when all came from the state bundle.",
}


def exposition(service: Service) -> str:
    """Return the whole page, in Prometheus' text format."""
    stats = _engine_stats(service)
    lines = _lines(service, stats)
    if service.settings.model is not None:
        lines = (_with_model(line, escape(service.model.name)) for line in lines)
    return "\n".join(lines) + "\n" + str(stats.get(EXPOSITION, ""))


def _with_model(line: str, name: str) -> str:
    """Add the label ``model`` to the line of a sample, so that dashboards can distinguish functions."""
    if line.startswith("#"):
        return line
    sample, _, value = line.rpartition(" ")
    if sample.endswith("}"):
        return f'{sample[:-1]},model="{name}"}} {value}'
    return f'{sample}{{model="{name}"}} {value}'


def _lines(service: Service, stats: dict[str, Any]) -> Iterator[str]:
    from medusa_runtime.state.key import engine_version  # some milliseconds, which a start does not need

    engine = service.settings.engine
    versions = (("engine_version", engine_version(engine)), ("weights", _weights_version(service)))
    info = (("runtime", __version__), ("engine", engine), *versions)
    yield from gauge("medusa_info", "What this instance runs; weights is a digest of their files' versions.", (info, 1))
    yield from service.metrics.lines()
    admission = service.admission
    yield from gauge(
        "medusa_ready",
        "1 when requests are answered at once, 0 while the function starts or drains.",
        ((), int(service.ready)),
    )
    yield from gauge(
        "medusa_requests_in_flight",
        "Requests accepted and not yet answered, those that wait included.",
        ((), admission.in_flight),
    )
    held = 0 if service.ready else admission.in_flight
    yield from gauge(
        "medusa_requests_held", "Requests accepted before the function was ready, which wait for it.", ((), held)
    )
    yield from gauge(
        "medusa_requests_refused_total",
        "Requests refused because too many were in flight (429, or 503 during the start).",
        ((), admission.refused),
    )
    if service.region is not None:
        progress = service.region.progress()
        yield from gauge(
            "medusa_fetched_bytes",
            "Bytes of the weights that have been fetched into this machine's memory.",
            ((), progress.fetched_bytes),
        )
        yield from gauge("medusa_weights_bytes", "Size of the model's weights in bytes.", ((), progress.total_bytes))
        yield from gauge(
            "medusa_fetch_retries_total", "Requests to the store that were tried again.", ((), progress.retries)
        )
    yield from _processes(service)
    yield from _engine(stats)
    yield from _start(service.timeline.stages(), ready=service.ready)


def _weights_version(service: Service) -> str:
    region = service.region
    if region is None or region.progress().state not in ("fetching", "done"):
        return ""
    try:
        return region.wait_index().version
    except MedusaError:  # the fetch has just failed
        return ""


def _start(stages: list[Stage], *, ready: bool) -> Iterator[str]:
    if ready and ready_at(stages) is not None:
        began_ns, ended_ns = window(stages)
        yield from gauge(
            "medusa_cold_start_seconds",
            "Seconds from the start until the instance was ready, or to the first token of a request that waited.",
            ((), (ended_ns - began_ns) / 1e9),
        )
    seconds: dict[tuple[str, str], float] = {}
    for stage in stages:
        key = (stage.name, stage.process)
        seconds[key] = seconds.get(key, 0.0) + (stage.end_ns - stage.start_ns) / 1e9
    samples = [((("stage", name), ("process", process)), value) for (name, process), value in seconds.items()]
    yield from gauge(
        "medusa_cold_start_stage_seconds",
        "Seconds that each stage of this cold start took, by stage and process.",
        *samples,
    )
    restored = {str(s.detail["artifact"]): "left_out" not in s.detail for s in stages if s.name == "restore"}
    yield from gauge(
        "medusa_state_artifact_used",
        "1 if this start used this part of the state bundle, 0 if it left it out; the log says why.",
        *[((("artifact", name),), int(used)) for name, used in restored.items()],
    )
    names = {stage.name for stage in stages}
    asked: list[tuple[Labels, float]] = [((), int("node-fallback" not in names))] if "node" in names else []
    yield from gauge(
        "medusa_node_agent_used",
        "1 if the node agent gave this start what it asked for, 0 if the function fell back; the log says why.",
        *asked,
    )


def _processes(service: Service) -> Iterator[str]:
    beats = service.probes.heartbeats
    roles = [((("process", role),), role) for role in ROLES if beats.pid(role)]
    ages = [(labels, round(beats.age_s(role), 3)) for labels, role in roles]
    yield from gauge("medusa_heartbeat_age_seconds", "Since each process gave a sign of life.", *ages)
    restarts = [((("process", role),), beats.restarts(role)) for role in ROLES]
    yield from gauge("medusa_process_restarts_total", "Processes that were replaced after they ended.", *restarts)
    hung = beats.hung()
    yield from gauge(
        "medusa_process_hung",
        "1 while a process does not run.",
        *[(labels, int(role in hung)) for labels, role in roles],
    )


def _engine_stats(service: Service) -> dict[str, Any]:
    """Return the engine's numbers, and with the key EXPOSITION lines that it has made itself, with its own labels."""
    try:
        return {} if service.engine is None else service.engine.stats()
    except MedusaError:  # it is being restarted; the rest of the page is still wanted
        return {}


def _engine(stats: dict[str, Any]) -> Iterator[str]:
    for name, value in stats.items():
        if isinstance(value, int | float):
            text = _ENGINE_TEXTS.get(name, f"The engine's {name.replace('_', ' ')}.")
            yield from gauge(f"medusa_engine_{name}", text, ((), value * 1))  # a bool as 0 or 1
