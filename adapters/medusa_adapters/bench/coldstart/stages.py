"""Where the time to the first token goes, stage by stage: medians over all samples of a row."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from ...report import gantt
from .contestants import Sample

_SHOWN_MS = 1.0


def stages_table(name: str, samples: Sequence[Sample]) -> str:
    """Return a line for each stage that began before the first token and took a millisecond, in the order of beginning.

    ``at`` is when the stage began, from the begin of the sample; ``ms`` is how long it worked until the first token.
    ``alone`` is the part of that in which no other stage worked: at most that much earlier would the first token come
    without the stage. Stages that are not in every sample are left out.
    """
    begins, takes, alones = defaultdict(list), defaultdict(list), defaultdict(list)
    for sample in samples:
        first_token_ns = sample.began_ns + round(sample.ttft_s * 1e9)
        spans = {
            (track.process, track.name): [(start, min(stop, first_token_ns)) for start, stop in track.spans]
            for track in gantt.tracks(sample.stages)
            if track.start_ns < first_token_ns
        }
        for key, own in spans.items():
            others = [span for other, its in spans.items() if other != key for span in its]
            begins[key].append((own[0][0] - sample.began_ns) / gantt.MS)
            takes[key].append(sum(stop - start for start, stop in own) / gantt.MS)
            alones[key].append(_uncovered_ns(own, others) / gantt.MS)
    lines = [
        (statistics.median(begins[key]), statistics.median(takes[key]), statistics.median(alones[key]), *key)
        for key in begins
        if len(begins[key]) == len(samples) and statistics.median(takes[key]) >= _SHOWN_MS
    ]
    ttft_ms = statistics.median(sample.ttft_s for sample in samples) * 1e3
    return "\n".join(
        [
            f"{name}: {ttft_ms:.0f} ms to the first token, median of {len(samples)}",
            "    at      ms   alone  stage",
            *(
                f"{at:6.0f}  {ms:6.0f}  {alone:6.0f}  {process}: {stage}"
                for at, ms, alone, process, stage in sorted(lines)
            ),
        ]
    )


def _uncovered_ns(own: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Return the time of ``own`` that no interval of ``others`` covers. ``own`` do not overlap each other."""
    total = 0
    for start, stop in own:
        reached = start
        for other_start, other_stop in sorted(others):
            if other_stop > reached and other_start < stop:
                total += max(0, other_start - reached)
                reached = max(reached, other_stop)
        total += max(0, stop - reached)
    return total
