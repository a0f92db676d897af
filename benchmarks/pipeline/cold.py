"""The time to the first token of a cold start by one worker and by groups, and its prediction (ParaServe §8.2)."""

from __future__ import annotations

from statistics import median
from typing import Any

from medusa_cluster.node.instance_readers import start_times
from medusa_runtime.state.stage_times import StageTimes, WorkerRates
from medusa_runtime.timeline import Stage

from benchmarks.pipeline.options import Options
from benchmarks.pipeline.workers import Site, Workers
from benchmarks.result_row import row

SIZES = (1, 2, 4)
_PROMPT, _COUNT = 32, 16
_NS = 1e9
_LINK_BYTES_PER_S = 1.7e6


def rows(options: Options) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    # Over this link the fetch takes as long as that of the 1.6 GB model over 50 MB/s.
    with Site(options.over(_LINK_BYTES_PER_S), min(max(SIZES), options.largest)) as site:
        sizes = [size for size in SIZES if size <= min(len(site.bytes.layers), options.largest)]
        ttft: dict[int, list[float]] = {size: [] for size in sizes}
        decode: dict[int, list[float]] = {size: [] for size in sizes}
        starts: list[list[Stage]] = []
        for _ in range(options.runs):
            for size in sizes:
                with Workers.group(site, size) as workers:
                    stream = workers.stream(prompt=_PROMPT, count=_COUNT, began=workers.began)
                    ttft[size].append(stream.ttft_s)
                    decode[size].append(median(stream.gaps()))
                    workers.end()
                    if size == 1:
                        starts.append(workers.timelines[0])
        for size in sizes:
            found.append(row(f"cold-{size}", "ttft_s", "s", ttft[size]))
            found.append(row(f"cold-{size}", "tpot_s", "s", decode[size]))
        for size in sizes[1:]:
            ratios = [one / several for one, several in zip(ttft[1], ttft[size], strict=True)]
            found.append(row("cold", f"speedup_{size}", "ratio", ratios))
        found += _predictions(site, starts, decode, ttft)
    return found


def _predictions(
    site: Site, starts: list[list[Stage]], decode: dict[int, list[float]], ttft: dict[int, list[float]]
) -> list[dict[str, Any]]:
    """Predict each size's first token by Eq. 5 from the starts of one worker, and compare with the measurements."""
    times = _times(site, starts, median(decode[1]))
    hop_s = max((median(decode[size]) - median(decode[1])) / size for size in decode) if len(decode) > 1 else 0.0
    errors, found = [], []
    for size, measured in ttft.items():
        # Layers are not cut, so parts are not equal, and the slowest worker fetches the largest.
        share = site.total_bytes / size / site.part_bytes(size) if size > 1 else 1.0
        workers = [WorkerRates(site.link_bytes_per_s * share)] * size
        predicted = times.predicted_ttft_s(workers, full_memory=size, hop_s=max(hop_s, 0.0) if size > 1 else 0.0)
        found.append(row(f"prediction-{size}", "ttft_s", "s", [predicted]))
        errors.append(100 * abs(predicted - median(measured)) / median(measured))
    return [*found, row("prediction", "error_pct", "%", [max(errors)])]


def _times(site: Site, starts: list[list[Stage]], decode_s: float) -> StageTimes:
    """Return the stage times of one worker's starts. Its weights are views of the region, so nothing is copied."""
    found = [_summary(stages) for stages in starts]
    return StageTimes(
        container_s=median([start["begins_s"] for start in found]),
        device_s=0.0,
        import_s=0.0,
        prefill_s=median([start["prefill_s"] for start in found]),
        decode_s=decode_s,
        weights_bytes=site.total_bytes,
        load_bytes_per_s=float("inf"),
        ttft_s=median([start["ttft_s"] for start in found]),
        starts=len(starts),
        fetch_begins_s=median([_begin_s(stages, "fetch") - _begin_s(stages, "exec") for stages in starts]),
    )


def _summary(stages: list[Stage]) -> dict[str, float]:
    """Summarize a start whose request arrived at the beginning."""
    found = start_times(
        [stage._asdict() | {"duration_ms": (stage.end_ns - stage.start_ns) / 1e6} for stage in stages], 0
    )
    assert found is not None
    return found


def _begin_s(stages: list[Stage], name: str) -> float:
    return next(stage.start_ns for stage in stages if stage.name == name) / _NS
