"""Draw the papers' figures from simulations: ``python -m benchmarks.simulation --figure paraserve-9``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import command_line
from benchmarks.simulation import blitzscale, equal_slo, groups, medusa, misses, paraserve, speed
from benchmarks.simulation.figure import BANDS, Figure

FIGURES: dict[str, Callable[[float], Figure]] = {
    "paraserve-5": groups.figure_5,
    "paraserve-7": paraserve.figure_7,
    "paraserve-8": paraserve.figure_8,
    "paraserve-9": paraserve.figure_9,
    "paraserve-10": paraserve.figure_10,
    "paraserve-11": paraserve.figure_11,
    "paraserve-12": paraserve.figure_12,
    "paraserve-13": groups.figure_13,
    "paraserve-14": paraserve.figure_14,
    "paraserve-15": groups.figure_15,
    "blitzscale-3": speed.figure_3,
    "blitzscale-4": misses.figure_4,
    "blitzscale-17": blitzscale.figure_17,
    "blitzscale-18": blitzscale.figure_18,
    "blitzscale-18-slo": equal_slo.figure,
    "blitzscale-19": blitzscale.figure_19,
    "blitzscale-20": blitzscale.figure_20,
    "blitzscale-21": blitzscale.figure_21,
    "blitzscale-22": blitzscale.figure_22,
    "blitzscale-24": blitzscale.figure_24,
    "blitzscale-pairs": speed.figure_pairs,
    "medusa-10": medusa.figure_10,
    "medusa-11": medusa.figure_11,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write each figure as SVG and its table as Markdown, and print the table. Raises ConfigError for a bad option."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--figure", default="all", metavar="LIST", help=f"of {', '.join(FIGURES)}; all")
    parser.add_argument("--out", type=Path, default=Path("out/figures"), metavar="FOLDER", help="out/figures")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="length of the traces; 3600")
    arguments = parser.parse_args(argv)
    chosen = ",".join(FIGURES) if arguments.figure == "all" else arguments.figure
    names = command_line.names("--figure", chosen, FIGURES)
    arguments.out.mkdir(parents=True, exist_ok=True)
    verdicts = ["| figure | verdict |", "|---|---|"]
    for name in names:
        begun = time.monotonic()
        figure = FIGURES[name](arguments.seconds)
        figure.write(arguments.out)
        print(figure.table())
        print(f"{arguments.out / name}.svg, {time.monotonic() - begun:.1f} s\n", flush=True)
        verdicts.append(f"| {name} | {figure.verdict()} |")
    print("\n".join(verdicts))
    print("In band: " + ", ".join(f"{unit}: {band}" for unit, band in BANDS.items()) + " of the published number.")
    return 0


if __name__ == "__main__":
    command_line.run(main)
