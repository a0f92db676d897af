"""What the results say of the targets, in lines: a number, what it was measured against, and whether it is enough."""

from __future__ import annotations

import statistics
from typing import Any

SHORTER = 0.425  # MEDUSA's reduction of the loading phase
FASTER = 8.0  # restoring against warm-up plus capture
RESTORE_S = 1.0
LINK_SHARE = 0.85
SLOWER = 0.01  # a restored graph's step against a captured one's

Results = dict[str, Any]


def lines(results: Results) -> list[str]:
    found = [f"{key}: FAILED {value['failed']}" for key, value in results.items() if "failed" in value]
    if any("device" in value and not value["device"] for value in results.values()):
        found.insert(0, "A DRY RUN, WITHOUT A GPU: none of these numbers means anything.")
    found += _link(results)
    for shape in shapes(results):
        found += _graphs(shape, results.get(f"{shape} captured", {}), results.get(f"{shape} restored", {}))
        found += _triggered(shape, results.get(f"{shape} captured", {}), results.get(f"{shape} triggered", {}))
        found += _phases(shape, results)
    return found


def shapes(results: Results) -> list[str]:
    return sorted({key.split(" ", 1)[0] for key in results if key.endswith(" materialize")})


def _link(results: Results) -> list[str]:
    limit = results.get("transfer", {}).get("pinned_gb_s")
    if not limit:
        return []
    found = [f"host to device, pinned: {limit:.1f} GB/s"]
    for part in ("transfer", "loading"):
        for way in ("register", "staging"):
            rate = results.get(part, {}).get(way, {})
            speed = rate.get("gb_s", rate.get("first_gb_s"))
            if speed:
                found.append(
                    _judged(f"{part} by {way}: {speed:.1f} GB/s, {speed / limit:.0%}", speed / limit >= LINK_SHARE)
                )
    return found


def _graphs(shape: str, captured: Results, restored: Results) -> list[str]:
    if "capture" not in captured or "restore" not in restored:
        return []
    capture_s, restore_s = captured["capture"]["seconds"], restored["restore"]["seconds"]
    count, missing = restored["restore"]["graphs"], restored["restore"]["missing"]
    found = [
        _judged(f"{shape}: {count} graphs restored, {len(missing)} missing", not missing),
        _judged(f"{shape}: restored in {restore_s:.2f} s", restore_s <= RESTORE_S),
        _judged(
            f"{shape}: captured in {capture_s:.2f} s, {capture_s / restore_s:.1f} times",
            capture_s / restore_s >= FASTER,
        ),
    ]
    different = differing(captured["hashes"], restored["hashes"])
    found.append(_judged(f"{shape}: sizes whose bits differ: {different or 'none'}", not different))
    ratios = [
        restored["steps"][size]["replay_ms"] / step["replay_ms"]
        for size, step in captured["steps"].items()
        if size in restored["steps"]
    ]
    if ratios:
        ratio = statistics.median(ratios)
        found.append(_judged(f"{shape}: restored steps take {ratio:.3f} of captured ones", ratio <= 1 + SLOWER))
        best = max(step["speedup"] for step in captured["steps"].values())
        found.append(f"{shape}: captured against eager decode: up to {best:.2f} times")
    return found


def differing(captured: dict[str, list[str]], restored: dict[str, list[str]]) -> list[str]:
    """Sizes of which any replay of any input gave other bits, there, here, or twice."""
    return [
        size
        for size, digests in captured.items()
        if restored.get(size) != digests or any(digests[n] != digests[n + 1] for n in range(0, len(digests), 2))
    ]


def medians(shape: str, results: Results) -> dict[str, Results]:
    """For each strategy the run of median length."""
    found: dict[str, list[Results]] = {}
    for key, value in results.items():
        if key.startswith(f"{shape} phase ") and "failed" not in value:
            found.setdefault(value["strategy"], []).append(value)
    return {name: sorted(runs, key=lambda run: float(run["loading_s"]))[len(runs) // 2] for name, runs in found.items()}


def _triggered(shape: str, captured: Results, triggered: Results) -> list[str]:
    if "restore" not in triggered:
        return []
    restore, known = triggered["restore"], captured.get("hashes", {})
    wrong = [size for size, digests in triggered["hashes"].items() if digests != known.get(size)]
    text = f"{shape}: {restore['graphs']} graphs with kernels of a captured first layer, in {restore['seconds']:.2f} s"
    return [_judged(f"{text}; other bits: {wrong}", not wrong)]


def _phases(shape: str, results: Results) -> list[str]:
    runs = medians(shape, results)
    if not {"capture", "medusa"} <= set(runs):
        return []
    ours, theirs = runs["medusa"]["loading_s"], runs["capture"]["loading_s"]
    shorter = 1 - ours / theirs
    text = f"{shape}: loading phase {ours:.2f} s against {theirs:.2f} s, {shorter:.1%} shorter"
    return [_judged(text, shorter >= SHORTER)]


def _judged(text: str, reached: bool) -> str:
    return f"{'ok  ' if reached else 'MISS'}  {text}"
