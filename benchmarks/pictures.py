"""Draw the pictures of the documents: the timeline of a start, the chart of the report, and the structure of the code.

The first two are drawn from a recorded measurement (docs/pictures/start.json), which ``--measure`` replaces by a new
one. The structure is drawn from the layers in pyproject.toml and the first lines of the packages' docstrings.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from medusa_adapters.bench.result import Result, Row
from medusa_runtime.timeline import Stage

from benchmarks.svg import STYLE, bars, gantt

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
RECORD = "start.json"
OURS = "medusa serve"
# What is measured: the benchmark's name of each row, and the picture's.
_ROWS = {
    "torch": OURS,
    "torch-snapshot": "… from a snapshot",
    "torch-prewarmed": "… pre-warmed",
    "transformers": "transformers",
}
_MARGIN = 16
_LINE = 25


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure a start first; the machine should be idle")
    parser.add_argument("--model", type=Path, default=ROOT / "out/llama-57m", help="the checkpoint to measure")
    parser.add_argument("--runs", type=int, default=5, help="samples of each row")
    parser.add_argument("--out", type=Path, default=PICTURES, help="where the pictures and the measurement are written")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.measure:
        record = measure(arguments.model, arguments.runs)
        (arguments.out / RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    else:
        record = json.loads((PICTURES / RECORD).read_text())
    for name, picture in draw(record).items():
        (arguments.out / name).write_text(picture)
        print(arguments.out / name)
    return 0


def measure(model: Path, runs: int) -> dict[str, Any]:
    """Measure cold starts like `medusa bench coldstart`. The stages are those of our start with the median time."""
    from medusa_adapters.bench.bytecode import compile_packages
    from medusa_adapters.bench.coldstart.command import median_sample, take_turns
    from medusa_adapters.bench.coldstart.contestants import Question
    from medusa_adapters.bench.coldstart.rows import make_contestants

    from benchmarks.coldstart.rows import ROWS

    compile_packages(sys.executable)
    folder = str(model.resolve(strict=True))
    question = Question(model=folder, folder=folder, prompt="This function returns", max_tokens=2)
    taking_part = make_contestants(list(_ROWS), ROWS)
    try:
        samples = take_turns(taking_part, question, runs)
    finally:
        for contestant in taking_part:
            contestant.close()
    result = Result()
    for name, taken in samples.items():
        result.add(_ROWS[name], "ttft_s", "s", [sample.ttft_s for sample in taken])
    stages = [stage._asdict() for stage in median_sample(samples["torch"]).stages]
    return {"machine": result.machine, "rows": [asdict(row) for row in result.rows], "stages": stages}


def draw(record: dict[str, Any]) -> dict[str, str]:
    """Return each picture by the name of its file."""
    return {
        "start.svg": _alone(gantt([Stage(**stage) for stage in record["stages"]])),
        "report.svg": _alone(bars([Row(**row) for row in record["rows"]], OURS)),
        "structure.svg": _alone(_structure()),
    }


def _alone(picture: str) -> str:
    """An inline picture of the report as a file of its own: with its colours, light or dark, and a background."""
    opening, _, body = picture.partition(">")
    left, top, width, height = (float(number) for number in opening.partition('viewBox="')[2].split('"')[0].split())
    box = (left - _MARGIN, top - _MARGIN, width + 2 * _MARGIN, height + 2 * _MARGIN)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{" ".join(f"{number:g}" for number in box)}"'
    style = STYLE + "svg{font-family:system-ui,sans-serif;min-width:0!important}.back{fill:var(--back)}"
    x, y, w, h = box
    back = f'<rect class="back" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8"/>'
    return f'{opening} width="{w:g}" height="{h:g}" role="img"><style>{style.strip()}</style>{back}{body}\n'


def _structure() -> str:
    """Packages from top to bottom; below a package that has layers of its own, those. Each imports only from below."""
    parts, y = [], 4
    for depth, name, text in _rooms():
        y += 10 if depth == 0 else 0
        shape = "ours" if depth == 0 else "other"
        parts.append(f'<rect class="{shape}" x="{24 * depth}" y="{y}" width="5" height="{_LINE - 5}"/>')
        place = f'x="{24 * depth + 14}" y="{y + 14}"'
        parts.append(f'<text {place} class="{"strong" if depth == 0 else "label"}">{escape(name)}</text>')
        parts.append(f'<text x="215" y="{y + 14}" class="value">{escape(text)}</text>')
        y += _LINE
    parts.append(f'<path class="range" d="M945 20V{y - 10}m-5 -8l5 8l5 -8"/>')
    parts.append('<text x="932" y="24" class="value end">imports</text>')
    return f'<svg viewBox="0 0 960 {y}">{"".join(parts)}</svg>'


def _rooms() -> Iterator[tuple[int, str, str]]:
    """Yield the depth, name and purpose of every package and layer, in the order of the contracts in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    roots = [ROOT / folder for folder in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    contracts = [each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    inner = {name: each["layers"] for each in contracts for name in each.get("containers", ())}
    (outer,) = (each["layers"] for each in contracts if not each.get("containers"))
    for package in _names(outer):
        yield 0, package, _purpose(roots, package)
        for room in _names(inner.get(package, [])):
            yield 1, room, _purpose(roots, f"{package}.{room}")


def _names(layers: list[str]) -> Iterator[str]:
    """Yield the modules of layers, which import-linter writes as ``a``, ``(optional)`` or ``beside | each other``."""
    for layer in layers:
        yield from (name.strip(" ()") for name in layer.replace(":", "|").split("|"))


def _purpose(roots: list[Path], module: str) -> str:
    """Return the first line of a module's docstring, up to the end of its first sentence."""
    path = module.replace(".", "/")
    files = [root / name for root in roots for name in (f"{path}/__init__.py", f"{path}.py") if (root / name).exists()]
    if not files:
        raise SystemExit(f"pyproject.toml names the layer {module}, which is not there; expected {path}.py or a folder")
    text = (ast.get_docstring(ast.parse(files[0].read_text())) or "").partition("\n")[0]
    return text.partition(". ")[0].rstrip(".").replace("``", "")


if __name__ == "__main__":
    sys.exit(main())
