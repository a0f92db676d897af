"""Compares the results of run 5 with the targets, in lines for the summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.targets import FASTER, RESTORE_S, SHORTER, judged, judged_steps

INSTALL = "it is not installed here: pip install 'vllm==0.32.0', and start run 5 again"
PROMISED = ("qwen2.5-0.5b", "llama-3-8b")
VARIANTS = {"vLLM": "vllm", "compiled vLLM": "vllm compiled"}  # as a line says it: as a result's key does
# Each row that is promised for a shape, and what its line says where there is one.
_ROWS = {
    "graphs that are kept": "graphs kept",
    "restoring against its own capture": "restored in",
    "tokens and logits of restored graphs": "restored graphs: sizes that differ",
    "tokens and logits against vLLM's own worker": "vLLM's own worker: sizes that differ",
    "a restored step against a captured one": "restored steps take",
    "the loading phase against vLLM's own": "loading phase",
}
_PARTS = ("captured", "bundle", "restored", "stock", "cold")

Results = Mapping[str, Any]


def vllm_lines(results: Results) -> list[str]:
    """Return the lines of run 5. The targets are those of the torch engine's graphs."""
    here = results.get("vllm", {})
    if "absent" in here:
        return [f"----  vLLM: not measured: {here['absent']}"]
    found = [_which(here)] if "vllm" in here else []
    measured = {key.split(" ", 1)[0] for key in results if " vllm " in key}
    for shape in sorted(measured):
        for name, key in VARIANTS.items():
            parts = {part: results.get(f"{shape} {key} {part}", {}) for part in _PARTS}
            said = f"{shape}: {name}"
            found += _kept(said, parts["bundle"])
            found += _restored(said, parts["captured"], parts["restored"])
            found += _same(said, "restored graphs", parts["captured"], parts["restored"])
            found += _same(said, "vLLM's own worker", parts["stock"], parts["captured"])
            found += _steps(said, parts["captured"], parts["restored"])
            found += _loading(said, parts["stock"], parts["restored"])
            if "loading_s" in parts["cold"]:
                found.append(f"{said}: vLLM's own loading phase with empty caches {parts['cold']['loading_s']:.2f} s")
    if not found:
        return ["----  vLLM: not measured"]
    dry = bool(here) and not here.get("device")
    for shape in sorted(measured) if dry else PROMISED:
        for row, marker in _ROWS.items():
            if not any(line.partition(f"{shape}: vLLM")[2] and marker in line for line in found):
                found.append(f"----  {shape}: vLLM: {row}: not measured")
    return found


def _which(here: Results) -> str:
    replaced = ", ".join(f"{name} ({why})"[:120] for name, why in here.get("replaced", {}).items())
    stand_in = f"; a stand-in for {replaced}" if replaced else ""
    needs = ", ".join(here.get("compiled_needs", ()))
    eager = f"; only eager models, as vLLM needs {needs} to compile" if needs else ""
    return f"vLLM {here['vllm']}, torch {here['torch']}, {here['platform']}{stand_in}{eager}"


def _kept(said: str, made: Results) -> Iterator[str]:
    if "kept" not in made:
        return
    refused = made["refused_for"]
    kept = " and ".join(f"{count} {kind}" for kind, count in sorted(made["kept"].items())) or "none"
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items())) or "none"
    text = f"{said}: graphs kept: {kept}; refused: {why}; {made['pinned']} pinned; {made['bytes'] / 1e6:.1f} MB"
    yield judged(f"{text} in {made['seconds']:.0f} s", not refused and bool(made["kept"]))


def _restored(said: str, captured: Results, restored: Results) -> Iterator[str]:
    seconds = restored.get("stages", {}).get("restore_graphs")
    own = captured.get("stages", {}).get("capture")
    if seconds is None:
        if "graphs" in restored:
            yield f"MISS  {said}: no graph was restored; the log says why"
        return
    graphs = restored["graphs"]
    count = graphs["full"] + graphs["piecewise"] - graphs["captured"]
    yield judged(
        f"{said}: {count} graphs restored in {seconds:.2f} s, {graphs['captured']} captured", seconds <= RESTORE_S
    )
    if own:
        text = f"{said}: graphs captured by vLLM in {own:.2f} s, {own / seconds:.1f} times"
        yield judged(text, own / seconds >= FASTER)


def _same(said: str, whose: str, one: Results, other: Results) -> Iterator[str]:
    if "batches" not in one or "batches" not in other:
        return
    sizes = [size for size in one["batches"] if size in other["batches"]]
    wrong = [size for size in sizes if one["batches"][size] != other["batches"][size]]
    text = f"{said}: {len(sizes)} sizes, {whose}: sizes that differ: {', '.join(wrong) or 'none'}"
    yield judged(text, bool(sizes) and not wrong)


def _steps(said: str, captured: Results, restored: Results) -> Iterator[str]:
    theirs = restored.get("steps", {})
    ratios = [theirs[size] / step for size, step in captured.get("steps", {}).items() if size in theirs]
    yield from judged_steps(said, ratios)


def _loading(said: str, stock: Results, restored: Results) -> Iterator[str]:
    ours, theirs = restored.get("loading_s"), stock.get("loading_s")
    if ours and theirs:
        text = f"{said}: loading phase {ours:.2f} s against vLLM's own {theirs:.2f} s, {1 - ours / theirs:.1%} shorter"
        yield judged(text, 1 - ours / theirs >= SHORTER)
    if (first := restored.get("first_s")) is not None and (their_first := stock.get("first_s")) is not None:
        ours, theirs = ours + first, theirs + their_first
        yield f"{said}: with the first token: {ours:.2f} s against {theirs:.2f} s, {1 - ours / theirs:.1%} shorter"
    ours, theirs = (start.get("stages", {}).get("load") for start in (restored, stock))
    if ours and theirs:  # the weights come by our link, or by vLLM's own copies
        yield f"{said}: the model and its weights in {ours:.2f} s against {theirs:.2f} s"
