"""The timeline of a model's inference under each strategy, as Cicada's Fig. 15 draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cicada.pipeline import NAMES, UNITS, Stage, merged, without


def draw(model: str, samples: Mapping[str, Sequence[Stage]], path: Path) -> None:
    """One chart a strategy, on one time axis: a row a unit, a colour a layer. The ending of ``path`` is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, charts = pyplot.subplots(
        len(samples), 1, sharex=True, squeeze=False, figsize=(10, 1.5 * len(samples) + 0.6), layout="constrained"
    )
    layers = list(dict.fromkeys(s.layer for stages in samples.values() for s in stages if s.name == "execute"))
    colours = pyplot.get_cmap("viridis")
    for (strategy, stages), chart in zip(samples.items(), charts[:, 0], strict=True):
        waits = merged((s.start, s.end) for s in stages if s.name == "wait")
        for stage in sorted(stages, key=lambda stage: stage.name != "forward"):  # layers over it
            unit = UNITS.get(stage.name)
            if unit is None:
                continue
            spans = [(stage.start, stage.end)]
            spans = without(spans, waits) if unit == "E" else spans
            place = _place(stage.layer, layers)
            chart.broken_barh(
                [(start, end - start) for start, end in spans],
                (len(NAMES) - 1 - list(NAMES).index(unit) + 0.1, 0.8),
                color="#9a9a9a" if place is None else colours(place),
            )
        chart.set_yticks([len(NAMES) - 0.5 - row for row in range(len(NAMES))], NAMES.values())
        chart.set_ylim(0, len(NAMES))
        end = max((stage.end for stage in stages if stage.name in UNITS), default=0.0)
        chart.set_title(f"{strategy}, {end:.2f} s", loc="left", fontsize="medium")
    charts[-1, 0].set_xlabel("seconds after the request")
    charts[-1, 0].set_xlim(left=0)
    figure.suptitle(f"{model}: a colour a layer, from the first (dark) to the last (bright); grey: of no one layer")
    figure.savefig(path)
    pyplot.close(figure)


def _place(layer: str, layers: Sequence[str]) -> float | None:
    """The layer's place from 0 to 1; None for no layer. A part (layer1.0.conv1) belongs to its layer (layer1.0)."""
    found = next((place for place, name in enumerate(layers) if f"{layer}.".startswith(f"{name}.")), None)
    return None if found is None else found / max(len(layers) - 1, 1)
