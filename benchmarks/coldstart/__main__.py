"""Measure our cold starts and others' in turn: ``python -m benchmarks.coldstart --model DIR --vs transformers``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from medusa_adapters.bench.bytecode import compile_packages
from medusa_adapters.bench.coldstart import command as coldstart
from medusa_adapters.bench.coldstart.command import Samples
from medusa_adapters.bench.coldstart.contestants import Contestant, Medusa, Question, Sample
from medusa_adapters.bench.coldstart.rows import check_vllm, make_contestants
from medusa_adapters.bench.result import Result, Target
from medusa_adapters.cli.flags import add_common_options
from medusa_runtime.errors import ConfigError, MedusaError

from benchmarks import command_line
from benchmarks.coldstart.llama_cpp import NAME as LLAMA_CPP
from benchmarks.coldstart.llama_cpp import OBJECT, LlamaCpp, llama_cpp
from benchmarks.coldstart.others import Script, yardsticks
from benchmarks.coldstart.rows import LABELS, ROWS, SAME_TOKENS
from benchmarks.origin import Origin, Variant

_OTHERS = ("transformers", LLAMA_CPP)
_ORIGINS = ("local", "http", "s3")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parsed(argv)
    others = command_line.names("--vs", arguments.vs, _OTHERS)
    command_line.names("--origin", arguments.origin, _ORIGINS)
    if arguments.turns is not None and (arguments.turns < 2 or arguments.steady):
        raise ConfigError(f"--turns={arguments.turns}: expected 2 or more, and no --steady")
    question = coldstart.question_of(arguments)
    if not question.folder:
        raise ConfigError(f"--model={question.model!r}: expected a folder, which all contestants read; see --origin")
    ours = Medusa(arguments.engine, python=arguments.vllm_python if arguments.engine == "vllm" else sys.executable)
    rows = {**ROWS, LLAMA_CPP: lambda _: llama_cpp(arguments.llama_server, arguments.gguf)}
    if arguments.rows:
        contestants = make_contestants(arguments.rows.split(","), rows, arguments.vllm_python)
    else:
        check_vllm([arguments.engine], arguments.vllm_python)
        measured_by = [] if arguments.no_yardsticks else yardsticks()
        contestants = [ours, *make_contestants(others, rows), *measured_by]
    for python in {sys.executable, arguments.vllm_python}:
        compile_packages(python)
    result = Result()
    with origin(question, arguments.origin, arguments.gguf, counting=arguments.instances > 1) as question:
        samples = measure(result, arguments, contestants, ours, question)
    found = targets(result, contestants[0].name)
    coldstart.present(result, samples, arguments, contestants[0].name, question, targets=found, labels=LABELS)
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coldstart", description=(__doc__ or "").partition(":")[0] + "."
    )
    coldstart.add_arguments(parser, [*ROWS, LLAMA_CPP])
    parser.add_argument("--vs", default="", metavar="LIST", help=f"compare with these, of {','.join(_OTHERS)}")
    parser.add_argument(
        "--origin", default="local", metavar="WHERE", help=f"where ours reads from: {', '.join(_ORIGINS)}"
    )
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PATH", help="the interpreter that has vLLM")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help=f"the same model for {LLAMA_CPP}")
    parser.add_argument("--llama-server", default="llama-server", metavar="PATH", help=f"the server of {LLAMA_CPP}")
    parser.add_argument("--no-yardsticks", action="store_true", help="leave out torch-import and floor")
    parser.add_argument("--steady", action="store_true", help="tokens/s at batch 1 and 8 instead of starts")
    parser.add_argument("--steady-tokens", type=int, default=64, metavar="N", help="tokens of each sequence then")
    parser.add_argument("--turns", type=int, metavar="N", help="first tokens of a chat's N turns instead of starts")
    add_common_options(parser)
    return parser.parse_args(argv)


def measure(
    result: Result,
    arguments: argparse.Namespace,
    contestants: Sequence[Contestant],
    ours: Medusa,
    question: Question,
) -> Samples:
    if not arguments.steady and arguments.turns is None:
        servers = [contestant for contestant in contestants if isinstance(contestant, LlamaCpp)]
        return coldstart.measure(result, arguments, contestants, ours, question, check_same_tokens, servers)
    from benchmarks.coldstart.steady import measure_steady
    from benchmarks.coldstart.turns import measure_turns

    with ExitStack() as stack:
        for contestant in contestants:
            stack.callback(contestant.close)
        timed = [contestant for contestant in contestants if not isinstance(contestant, Script)]
        if arguments.turns is None:
            measure_steady(result, timed, question, tokens=arguments.steady_tokens, runs=arguments.runs)
        else:
            measure_turns(result, timed, question, turns=arguments.turns, runs=arguments.runs)
    return {}


def check_same_tokens(samples: Samples, name: str, sample: Sample) -> None:
    """Raise MedusaError if contestants that run the same code give different texts."""
    for group in SAME_TOKENS:
        for other in group if name in group else ():
            for earlier in samples.get(other, ())[:1]:
                if earlier.text != sample.text:
                    raise MedusaError(f"{name} and {other} disagree: {sample.text[:80]!r} and {earlier.text[:80]!r}")


@contextmanager
def origin(question: Question, where: str, gguf: Path | None = None, *, counting: bool) -> Iterator[Question]:
    """Serve the checkpoint, and the GGUF file if there is one, from a store on loopback while the context is open.

    ``where`` is local (no store is started), http or s3. The context's value is the question with the model's URL in
    that store. With ``counting``, it also has a function that returns how many bytes the store has sent.
    """
    if where == "local":
        yield question
        return
    with tempfile.TemporaryDirectory(prefix="medusa-bench-") as scratch:
        root = Path(scratch) / "root"
        (root / "bucket").mkdir(parents=True)
        name = f"model{Path(question.folder).suffix if Path(question.folder).is_file() else ''}"
        (root / "bucket" / name).symlink_to(question.folder)
        if gguf and not (root / OBJECT).exists():
            (root / OBJECT).symlink_to(gguf.resolve())
        Path(scratch).chmod(0o755)
        with Origin(root, Path(scratch) / "origin", Variant("plain"), counting=counting) as store:
            env = {"AWS_ENDPOINT_URL": store.url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
            env |= {"AWS_DEFAULT_REGION": "us-east-1"}
            model = f"s3://bucket/{name}" if where == "s3" else f"{store.url}/bucket/{name}"
            yield replace(question, model=model, env=env, sent_bytes=store.sent_bytes if counting else None)


def targets(result: Result, ours: str) -> list[Target]:
    """Return the ratios for which this project has set itself a bound, as far as both sides were measured."""
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


if __name__ == "__main__":
    command_line.run(main)
