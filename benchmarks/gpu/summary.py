"""Compares the results with the targets, in lines: a number, its target, and whether it is enough."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.targets import (
    FASTER,
    LINK_SHARE,
    OFFLINE_BYTES,
    OFFLINE_S,
    REPLAYS,
    RESTORE_S,
    SHORTER,
    judged,
    judged_steps,
)
from benchmarks.gpu.vllm_check.lines import vllm_lines

PROMISED = ("llama-3-8b", "qwen2.5-0.5b", "opt-1.3b")
_LONGEST = 10  # of the driver's functions, how many are shown
_MOMENTS = {  # of a restore: the driver's functions that show when each was done
    "fingerprint": "cuDeviceGetName",
    "images": "cuLibraryLoadData",
    "kernels": "cuKernelGetFunction",
    "graphs": "cuGraphInstantiateWithParams",
    "replays": "cuGraphLaunch",
}
_DRY = "A DRY RUN, WITHOUT A GPU: none of these numbers means anything."
# Each row that is promised, and what its line says where there is one.
_ROWS = {
    "context beside imports": "of the context",
    "host to device, of the limit": "loading: ",
    "a group of workers on one GPU": "two workers of a group",
    "from the command to the first answer": "medusa serve, ",
    "a nearly full GPU": "MB left: ",
    "a crash after --host-weights release": "whose weights were released",
}
_SHAPE_ROWS = {
    "the offline phase": "materialized in",
    "restoring": "restored in",
    "restoring against warm-up and capture": "captured in",
    "bits, 3 inputs x 2 replays a size": "bits differ",
    "a restored step against a captured one": "restored steps take",
    "captured against eager decode": "against eager decode",
    "the loading phase": "loading phase",
}

Results = dict[str, Any]


def lines(results: Results) -> list[str]:
    found = [f"{key}: FAILED {value['failed']}" for key, value in results.items() if "failed" in value]
    if any("device" in value and not value["device"] for value in results.values()):
        found.insert(0, _DRY)
    found += _probe(results)
    found += _overlap(results)
    found += _link(results)
    for shape in shapes(results):
        found += _offline(shape, results.get(f"{shape} materialize", {}))
        found += _graphs(shape, results.get(f"{shape} captured", {}), results.get(f"{shape} restored", {}))
        found += _triggered(shape, results.get(f"{shape} captured", {}), results.get(f"{shape} triggered", {}))
        found += _phases(shape, results)
    found += _groups(results)
    found += _serving(results)
    dry = found[:1] == [_DRY]
    for name, marker in _ROWS.items():
        if not any(marker in line for line in found):
            found.append(f"----  {name}: not measured")
    for shape in shapes(results) if dry else PROMISED:
        for name, marker in _SHAPE_ROWS.items():
            if not any(line.partition(f"{shape}: ")[2] and marker in line for line in found):
                found.append(f"----  {shape}: {name}: not measured")
    return found + vllm_lines(results)


def _probe(results: Results) -> list[str]:
    """The probe's rows, as it judged them."""
    rows = results.get("probe", {}).get("rows")
    if not rows:
        return ["----  probe: not measured"]
    return [f"{verdict:4}  probe: {name}: {details}"[:300] for name, verdict, details in rows]


def shapes(results: Results) -> list[str]:
    return sorted({key.split(" ", 1)[0] for key in results if key.endswith(" materialize")})


def _overlap(results: Results) -> list[str]:
    """Return how much of making the context the imports hide (ParaServe §5), in the part that shows it best."""
    hidden = []
    for value in results.values():
        begin, end = value.get("start", {}).get("context", (0.0, 0.0))
        if end > begin:
            imported = value["start"]["import"]
            hidden.append((max(min(end, imported[1]) - max(begin, imported[0]), 0.0) / (end - begin), end - begin))
    if not hidden:
        return []
    share, seconds = sorted(hidden)[len(hidden) // 2]
    return [judged(f"imports hide {share:.0%} of the context's {seconds:.2f} s", share >= 0.5)]


def _groups(results: Results) -> list[str]:
    """Return the lines for groups of two workers: whether their tokens are those of one engine, and the times."""
    found = []
    for key, value in results.items():
        if not key.endswith(" groups") or "failed" in value:
            continue
        shape, alone, group, gather = key.partition(" ")[0], value["alone"], value["group"], value["gather"]
        wrong, fell_back = value["wrong_answers"], group.get("alone")
        said = f"{shape}: two workers of a group: answers that are not one engine's: {wrong}"
        said += f" (from token {value['first_difference']} on)" if wrong else ""
        said += f"; the group fell back: {fell_back}" if fell_back else ""
        found.append(judged(said, not wrong and not fell_back and gather is not None))
        found.append(
            f"{shape}: first token after {group['ttft_s']:.2f} s in the group, {alone['ttft_s']:.2f} s alone; "
            f"{_ms(group['group_gap_ms'])} and {_ms(alone['gap_ms'])} from token to token, "
            f"{_ms(group['instance_gap_ms'])} once the group is an instance"
        )
        for where, one in (("alone", alone), ("in the group", group)):
            found.append(f"{shape}: the longest gap {where}: {_gap(one)}")
        if (pair := value.get("pair")) is not None:
            said = f"{shape}: an instance that prefills for another: answers that are not one engine's: "
            said += f"{pair['wrong_answers']}; it ran {pair['layers_helped']} layers"
            found.append(judged(said, not pair["wrong_answers"] and pair["layers_helped"] > 0))
        if gather is not None:
            found.append(
                f"{shape}: consolidated with a pause of {gather['pause_s'] * 1e3:.1f} ms for {gather['last_bytes']} "
                "bytes"
            )
    return found


def _serving(results: Results) -> list[str]:
    """Return the lines of run 7: the first answer, and the starts that had hardly any memory or lost their engine."""
    found = []
    for key, value in results.items():
        shape, part, engine = [*key.split(" "), "", ""][:3]
        if "failed" in value:
            continue
        if part == "served":
            times = f"{value['first_answer_s']:.2f} s from the command, the next one {value['later_answer_s']:.2f} s"
            found.append(judged(f"{shape}: medusa serve, {engine}: the first answer took {times}", value["same_text"]))
        elif part == "resumed":
            starts, plain = value["starts"], results.get(f"{shape} served {engine}", {})
            times = " and ".join(f"{one['first_answer_s']:.2f}" for one in starts)
            texts = {one["text"] for one in starts} | ({plain["text"]} if "text" in plain else set())
            said = f"{shape}: medusa serve, {engine}, from a snapshot of {value['saved_bytes'] / 1e6:.0f} MB: {times} s"
            found.append(judged(said, len(texts) == 1 and all(one["continued"] for one in starts)))
        elif part == "full":
            for left_mb, one in value["starts"].items():
                said = "an answer" if one.get("status") == 200 else f"{one['said']}; last line: {one['last_line']}"
                found.append(judged(f"{shape}: {engine} with {left_mb} MB left: {said}", one["clear"]))
        elif part == "released":
            said = "an answer" if value["after"].get("status") == 200 else value["after"]["last_line"]
            text = f"{shape}: an engine whose weights were released was killed; after {value['after_s']:.1f} s: {said}"
            found.append(judged(text, value["killed"] == 1 and value["after"]["clear"]))
    return found


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _gap(found: Results) -> str:
    """Return an answer's longest gap in words, with the stages that overlap it most."""
    gap = found["longest_gaps"][0]
    stages = ", ".join(f"{name} from {begin:.0f} to {end:.0f} ms" for name, begin, end in gap["stages"][:4])
    return f"{gap['ms']:.1f} ms before token {gap['token']}; meanwhile: {stages or 'no stage'}"


def _offline(shape: str, made: Results) -> list[str]:
    if "bytes" not in made:
        return []
    seconds, size = made["seconds"], made["bytes"]
    text = f"{shape}: materialized in {seconds:.1f} s, {size / 1e6:.1f} MB"
    return [judged(text, seconds <= OFFLINE_S and size <= OFFLINE_BYTES)]


def _link(results: Results) -> list[str]:
    limit = results.get("transfer", {}).get("pinned_gb_s")
    if not limit:
        return []
    found = [f"host to device, pinned: {limit:.1f} GB/s"]
    speeds = {
        "transfer": results["transfer"].get("link", {}).get("first_gb_s"),
        "loading": results.get("loading", {}).get("gb_s"),
    }
    for part, speed in speeds.items():
        if speed:
            found.append(judged(f"{part}: {speed:.1f} GB/s, {speed / limit:.0%}", speed / limit >= LINK_SHARE))
    return found


def _graphs(shape: str, captured: Results, restored: Results) -> list[str]:
    if "capture" not in captured or "restore" not in restored:
        return []
    capture_s, restore_s = captured["capture"]["seconds"], restored["restore"]["seconds"]
    count, missing = restored["restore"]["graphs"], restored["restore"]["missing"]
    found = [
        judged(f"{shape}: {count} graphs restored, {len(missing)} missing", not missing),
        judged(f"{shape}: restored in {restore_s:.2f} s", restore_s <= RESTORE_S),
        judged(
            f"{shape}: captured in {capture_s:.2f} s, {capture_s / restore_s:.1f} times",
            capture_s / restore_s >= FASTER,
        ),
    ]
    found += _restore_times(shape, restored["restore"])
    found += _by_builders(shape, restored.get("builders", {}), count)
    different = differing(captured["hashes"], restored["hashes"])
    replays = min(map(len, restored["hashes"].values()), default=0)
    text = f"{shape}: {len(captured['hashes'])} sizes, {replays} replays of each: sizes whose bits differ"
    found.append(judged(f"{text}: {', '.join(different) or 'none'}", not different and replays == REPLAYS))
    ratios = [
        restored["steps"][size]["replay_ms"] / step["replay_ms"]
        for size, step in captured["steps"].items()
        if size in restored["steps"]
    ]
    found += judged_steps(shape, ratios)
    if ratios:
        best = max(step["speedup"] for step in captured["steps"].values())
        found.append(f"{shape}: captured against eager decode: up to {best:.2f} times")
    return found


def _restore_times(shape: str, restore: Results) -> list[str]:
    """Return a line with the steps of a restore, and the driver's functions that took longest; none without them.

    Another one says when what was done, and how long each thread was in the driver.
    """
    names = {"begin_s": "begin", "decode_s": "decode the bundle, which is a part of that", "build_s": "build and check"}
    steps = [f"{restore[key] * 1e3:.0f} to {name}" for key, name in names.items() if key in restore]
    longest = list(restore.get("calls", {}).items())[:_LONGEST]
    calls = [f"{name} {one['seconds'] * 1e3:.0f} ({one['calls']})" for name, one in longest]
    if not steps:
        return []
    of_driver = f"; by function of the driver (calls): {', '.join(calls)}" if calls else ""
    found = [f"{shape}: ms of the restore: {', '.join(steps)}{of_driver}"]
    if "threads" in restore:
        times = {name: restore["calls"].get(function) for name, function in _MOMENTS.items()}
        moments = [f"{name} {one['from_s'] * 1e3:.0f} to {one['to_s'] * 1e3:.0f}" for name, one in times.items() if one]
        busy = [f"{thread} {one['seconds'] * 1e3:.0f}" for thread, one in restore["threads"].items()]
        found.append(f"{shape}: ms since its start: {', '.join(moments)}; in the driver, by thread: {', '.join(busy)}")
    return found


def _by_builders(shape: str, builders: Results, graphs: int) -> list[str]:
    """Return a line with the times of more restores of so many graphs, by the number of threads that build them."""
    times = [
        f"{count}: " + ", ".join(_restored_ms(run, graphs) for run in runs)
        for count, runs in builders.items()
        if count != "error"
    ]
    failed = f"; then it failed: {builders['error']}" if "error" in builders else ""
    said = f"{shape}: ms of one more restore, by threads that build graphs: {'; '.join(times)}{failed}"
    return [said] if builders else []


def _restored_ms(run: Results, graphs: int) -> str:
    fewer = f" (only {run['graphs']} graphs)" if run["graphs"] != graphs else ""
    return f"{run['seconds'] * 1e3:.0f}{fewer}"


def differing(captured: dict[str, list[str]], restored: dict[str, list[str]]) -> list[str]:
    """The sizes with other bits in any replay, between two processes or within one."""
    return [
        size
        for size, digests in captured.items()
        if restored.get(size) != digests or any(digests[n] != digests[n + 1] for n in range(0, len(digests), 2))
    ]


def medians(shape: str, results: Results) -> dict[str, Results]:
    """The run of median length for each strategy."""
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
    return [judged(f"{text}; other bits: {wrong}", not wrong)]


def _phases(shape: str, results: Results) -> list[str]:
    runs = medians(shape, results)
    if not {"capture", "medusa"} <= set(runs):
        return []
    ours, theirs = runs["medusa"]["loading_s"], runs["capture"]["loading_s"]
    shorter = 1 - ours / theirs
    text = f"{shape}: loading phase {ours:.2f} s against {theirs:.2f} s, {shorter:.1%} shorter"
    return [judged(text, shorter >= SHORTER)]
