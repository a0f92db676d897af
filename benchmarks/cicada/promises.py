"""What was promised of cold inferences, beside what was found."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_adapters.bench.result import Result, Target

_OVER_EAGER = {"vgg16": 2.0, "vgg19": 2.0, "resnet152": 2.0, "bert-base": 1.5, "llama-1b": 2.0}
# Cicada's own gains over PISeL (§5.1, §5.2): 34.8 % of latency, and 46 % of memory, which it took from ``free``: that
# is ``used_mb``, where files in the page cache do not count. In ``peak_mb`` and ``added_mb`` they do.
_MEMORY = ("used_mb", "added_used_mb", "peak_mb", "added_mb")
_OVER_PISEL = (("latency_s", 0.652), *((metric, 0.54) for metric in _MEMORY))


def find_targets(result: Result, models: Sequence[str]) -> list[Target]:
    """The promised ratios whose two sides were measured."""
    found: list[Target] = []
    gains: dict[str, list[float]] = {metric: [] for metric, _ in _OVER_PISEL}
    for model in models:
        ours, eager, pisel = (f"{model}/{strategy}" for strategy in ("full", "sequential", "pisel"))
        if (ratio := result.ratio("latency_s", eager, ours)) is not None:
            found.append(Target(f"{model}: load-then-run over ours", ratio, _OVER_EAGER.get(model, 1.0)))
        for metric, bound in _OVER_PISEL:
            if (ratio := result.ratio(metric, ours, pisel)) is not None:
                gains[metric].append(ratio)
                text = f"{model}: {metric} over PISeL's"
                if ratio > bound and (least := result.ratio(metric, f"{model}/floor", pisel)) is not None:
                    text += f" (the floor's: {least:.2f})"
                found.append(Target(text, ratio, bound, False))
            if (ratio := result.ratio(metric, f"{model}/converted", pisel)) is not None:
                found.append(Target(f"{model}, converted: {metric} over PISeL's", ratio, bound, False))
        if (used := result.median(ours, "utilisation")) is not None:
            found.append(Target(f"{model}: pipeline utilisation", used, 0.97))
        if (cost := result.ratio("warm_s", f"{model}/built", f"{model}/plain")) is not None:
            found.append(Target(f"{model}: a warm forward, over one without gates", cost, 1.005, False))
        for origin in ("limited", "delayed"):
            bound_s, ours_s = (result.median(f"{model}/{origin}{end}", "latency_s") for end in ("-bound", ""))
            if bound_s and ours_s:
                text = f"{model}: {origin} origin, over transfer and last layer"
                found.append(Target(text, ours_s / bound_s, 1.1, False))
    for metric, bound in _OVER_PISEL:
        if len(gained := gains[metric]) > 1:
            found.append(Target(f"all: {metric} over PISeL's, mean", sum(gained) / len(gained), bound, False))
    return found
