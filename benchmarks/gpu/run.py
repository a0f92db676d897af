"""The whole check of a GPU, in seven runs of a few minutes: ``python -m benchmarks.gpu.run --run 1 --out DIR``.

    1  the probe (``benchmarks.gpu.probe``); what the machine has; transfer limits; the loader's rate; the GPU tests
    2  Llama-3-8B's shape: materialize, capture, restore in a new process, same bits?, decode speed
    3  the same for Qwen2.5-0.5B's, OPT-1.3B's and (if minutes allow) Falcon-7B's
    4  the loading phase by three strategies, three times each
    5  vLLM, if it is installed: our worker and graphs beside its own; eager and compiled, Qwen2.5-0.5B's shape first
    6  a group of two workers that share the GPU, beside a single engine: the same tokens?
    7  ``medusa serve``: from the command to an answer, on a GPU that is nearly full, and after a crash

Without ``--run``, all of them are done, those first that nothing else shows. ``--minutes`` limits all of it together.
Every part is a process of its own with a timeout, and its result is written at once: what fails or hangs costs its own
minutes and nothing else. Each run leaves one tar in ``DIR``, of at most 64 MB. ``--dry-run`` runs all of it here, on
tiny shapes, with host memory in place of a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.kit import unpack
from benchmarks.gpu.probe import ROOT, ROOTS, SECONDS, ended, environ, pack
from benchmarks.gpu.summary import lines
from benchmarks.gpu.vllm_check.lines import INSTALL

SHAPES = {
    2: ("llama-3-8b",),
    3: ("qwen2.5-0.5b", "opt-1.3b", "falcon-7b"),
    4: ("llama-3-8b", "qwen2.5-0.5b", "opt-1.3b"),
    5: ("qwen2.5-0.5b", "llama-3-8b"),
    6: ("qwen2.5-0.5b", "llama-3-8b"),
    7: ("qwen2.5-0.5b",),
}
DRY_SHAPES = {
    2: ("tiny-llama",),
    3: ("tiny-qwen2", "tiny-opt", "tiny-falcon"),
    4: ("tiny-llama",),
    5: ("tiny-qwen3",),  # vLLM's attention on a CPU needs heads of 32 or more
    6: ("tiny-llama",),
    7: ("tiny-qwen3",),
}
MINUTES = {5: 10.0, 2: 4.0, 7: 4.0, 1: 9.0, 3: 6.0, 4: 8.0, 6: 1.5}
_ALL = tuple(MINUTES)  # in the order in which they are done
_PACKING_S = 15.0  # of the minutes, for the end of what still runs, and for the tar
_STAND_IN = str(ROOT / "benchmarks/gpu/vllm_check/stand_in")
_AHEAD_S = 300.0
_TESTS_S = 420.0
_REPEATS = 3
_STRATEGIES = ("capture", "async", "medusa")
_WITHOUT = {
    "torch": "nothing can be measured",
    "triton": "decode steps cannot be captured, so runs 2 to 4 will fail",
    "numpy": "no checkpoint can be written",
    "tokenizers": "only the probe, the transfers and the tests marked gpu can be run",
    "pytest": "the tests marked gpu will fail",
}


class Part(NamedTuple):
    """``key`` names its result; ``arguments`` are those of the ``module`` that runs it."""

    key: str
    name: str
    arguments: tuple[str, ...] = ()
    timeout_s: float = 180.0
    makes: Path | None = None  # without this file it is not done, whatever results say: a machine that is lent is bare
    module: str = "benchmarks.gpu.part"
    paths: tuple[str, ...] = ()  # folders in which its processes search for modules first


vllm_part = partial(Part, module="benchmarks.gpu.vllm_check.part", paths=(_STAND_IN,))


class Check:
    """Runs parts and keeps results; what is there already is not run again."""

    def __init__(self, out: Path, work: Path, *, dry_run: bool, budget_s: float) -> None:
        self._out = out
        self._work = work
        self._keeping = threading.Lock()
        for folder in (out, work):
            folder.mkdir(parents=True, exist_ok=True)
        self.dry_run = dry_run
        self._end = time.monotonic() + budget_s
        self._file = out / "results.json"
        self.results: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def run(self, part: Part) -> None:
        done = "failed" not in self.results.get(part.key, {"failed": ""})
        if done and (part.makes is None or part.makes.exists()):
            return
        left = self.left_s
        if left < 5:
            self.keep(part.key, {"failed": "the minutes were used up"})
            return
        name = part.key.replace(" ", "-")
        result, log = self._work / f"{name}.result.json", self._out / f"{name}.log"
        result.unlink(missing_ok=True)
        command = self.command(part, result)
        began = time.monotonic()
        with log.open("wb") as file:
            # A session of its own: what a part has started must not hold the GPU while the next ones are measured.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ(*part.paths),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = ended(process, min(part.timeout_s, left))
        took = time.monotonic() - began
        if result.exists() and status == 0:
            self.keep(part.key, {**json.loads(result.read_text()), "took_s": took})
        else:
            end = log.read_text(errors="replace").strip()[-600:]
            self.keep(part.key, {"failed": f"status {status} after {took:.0f} s: {end}"})
        print(f"{took:6.1f} s  {part.key}" + ("" if status == 0 else f"  FAILED ({status})"), flush=True)

    def command(self, part: Part, result: Path) -> list[str]:
        made = [sys.executable, "-m", part.module, part.name, str(result), *part.arguments]
        return [*made, "--dry-run"] if self.dry_run else made

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def keep(self, key: str, found: dict[str, Any]) -> None:
        with self._keeping:
            self.results[key] = found
            self._file.write_text(json.dumps(self.results, indent=1))

    def checkpoint(self, shape: str) -> Path | None:
        """A folder with random weights of this shape, made once; None where it could not be made in time."""
        began = time.monotonic()
        try:
            folder = make_checkpoint(self._work, shape, max(self.left_s, 1))
        except (subprocess.SubprocessError, OSError, TimeoutError) as error:
            said = getattr(error, "stderr", None) or b""
            self.keep(f"checkpoint {shape}", {"failed": f"{error}: {said.decode(errors='replace')[-300:]}"})
            return None
        print(f"{time.monotonic() - began:6.1f} s  checkpoint {shape}", flush=True)
        return folder


_making = threading.Lock()
_writers: list[subprocess.Popen[bytes]] = []  # all that were started


def make_checkpoint(work: Path, shape: str, timeout_s: float) -> Path:
    """Write a checkpoint unless it is there, and return its folder. Raises what made it fail."""
    folder = work / shape
    if not _making.acquire(timeout=timeout_s):
        raise TimeoutError("it was not written in time")
    try:
        if (folder / "done").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.make_checkpoint", "--shape", shape, "--out", str(folder)]
        with subprocess.Popen(
            command, cwd=ROOT, env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            _writers.append(process)
            try:
                _, said = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, stderr=said)
        (folder / "done").touch()
    except (subprocess.SubprocessError, OSError):
        shutil.rmtree(folder, ignore_errors=True)  # a full disk would cost the next shape, too
        raise
    finally:
        _making.release()
    return folder


def make_ahead(work: Path, shapes: Sequence[str]) -> None:
    """Write checkpoints in the background, so that the GPU does not wait for the disk when their turn comes."""

    def make_all() -> None:
        for shape in shapes:
            with suppress(subprocess.SubprocessError, OSError):  # it is tried again, and reported, when it is needed
                make_checkpoint(work, shape, _AHEAD_S)

    threading.Thread(target=make_all, name="checkpoints", daemon=True).start()


def shapes_of(numbers: Sequence[int], only: Sequence[str] = (), *, dry_run: bool) -> list[str]:
    """The shapes that these runs need, in the order in which they need them; of ``only``, if that is not empty."""
    shapes = {1: ("tiny-llama",), **DRY_SHAPES} if dry_run else {1: ("llama-3-8b",), **SHAPES}
    needed = dict.fromkeys(shape for number in numbers for shape in shapes[number])
    return [shape for shape in needed if not only or shape in only]


def steps(number: int, check: Check, shapes: Sequence[str]) -> Iterator[list[Iterator[Part]]]:
    """Yield the steps of a run: the parts of each, those of two lanes to be run side by side.

    More at a time would slow each other. vLLM's own starts are alone: it gives up if memory is freed while it measures.
    """
    if number != 5:
        yield [parts(number, check, shapes)]
        return
    variants = vllm_variants(check)
    for shape in shapes if variants else ():
        if (model := check.checkpoint(shape)) is not None:
            yield [vllm_parts(shape, model, *variant) for variant in variants]
            for variant in variants:
                yield [stock_parts(shape, model, *variant)]


def parts(number: int, check: Check, shapes: Sequence[str]) -> Iterator[Part]:
    """Yield the parts of a run in which none are side by side. A checkpoint is written when its first part is due."""
    if number == 1:
        yield Part("environment", "environment", timeout_s=90)
        yield Part("transfer", "transfer", timeout_s=120)
    for shape in shapes:
        if (model := check.checkpoint(shape)) is None:
            continue
        if number == 1:
            yield Part("loading", "loading", ("--model", str(model)), 150)
            continue
        if number == 6:
            yield group_part(shape, model, pair=shape == shapes[0])  # once is enough, and minutes are few
            continue
        if number == 7:
            yield from serving_parts(shape, model)
            continue
        bundle = ("--model", str(model), "--bundle", f"{model}.graphs")
        yield Part(f"{shape} materialize", "materialize", bundle, 240, Path(f"{model}.graphs"))
        if number == 4:
            for repeat in range(_REPEATS):  # outside: minutes that are used up leave as many of each
                for strategy in _STRATEGIES:
                    yield Part(f"{shape} phase {strategy} {repeat}", "phase", (*bundle, "--strategy", strategy), 120)
        else:
            yield Part(f"{shape} captured", "captured", bundle, 180)
            yield Part(f"{shape} restored", "restored", bundle, 180)
            if number == 3:
                yield Part(f"{shape} triggered", "triggered", bundle, 120)


def group_part(shape: str, model: Path, *, pair: bool) -> Part:
    arguments = ("--model", str(model), *(["--pair"] if pair else []))
    return Part(f"{shape} groups", "groups", arguments, 60, module="benchmarks.gpu.groups")


def has_vllm() -> bool:
    """Return whether vLLM is installed: a folder of that name is no package."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def serving_parts(shape: str, model: Path) -> Iterator[Part]:
    """Yield the parts of run 7: those with vLLM only if it is installed, with run 5's bundle if it is there."""
    vllm = has_vllm()
    part = partial(Part, module="benchmarks.gpu.serving", paths=(_STAND_IN,))
    for engine, bundle in (("torch", f"{model}.torch"), *([("vllm", f"{model}.vllm")] if vllm else [])):
        arguments = ("--model", str(model), "--engine", engine, "--bundle", bundle)
        yield part(f"{shape} served {engine}", "served", arguments, 240)
        if engine == "torch":  # there are no snapshots of a vLLM for GPUs
            yield part(f"{shape} resumed {engine}", "resumed", arguments, 90)
    for engine in ("torch", *(["vllm"] if vllm else [])):
        yield part(f"{shape} full {engine}", "full", ("--model", str(model), "--engine", engine), 240)
    yield part(f"{shape} released torch", "released", ("--model", str(model)), 120)


def vllm_variants(check: Check) -> list[tuple[str, str]]:
    """Return the keys of the kinds of start that can be measured with vLLM, each with its ``--compile``."""
    if not has_vllm():
        check.keep("vllm", {"absent": INSTALL})
        return []
    check.run(vllm_part("vllm", "imports", timeout_s=120))
    here = check.results["vllm"]
    if "failed" in here:
        return []
    # A dry run does not compile: Inductor's code for CPUs says nothing about a GPU, and takes minutes.
    eager_only = check.dry_run or here.get("compiled_needs")
    return [("vllm", "never"), *([] if eager_only else [("vllm compiled", "always")])]


def vllm_parts(shape: str, model: Path, key: str, how: str) -> Iterator[Part]:
    """Yield the parts with our worker in vLLM for one kind of start: the bundle, and starts with it."""
    bundle, options = vllm_options(model, key, how)
    by_command = ("--by-command",) if how == "never" else ()  # one bundle each way
    yield vllm_part(
        f"{shape} {key} bundle", "materialize", (*options, *by_command), 480, makes=Path(f"{bundle}.graphs")
    )
    yield vllm_part(f"{shape} {key} restored", "restored", options, 150)
    yield vllm_part(f"{shape} {key} captured", "captured", options, 180)


def stock_parts(shape: str, model: Path, key: str, how: str) -> Iterator[Part]:
    """Yield vLLM's own starts: as in a new container, and with the caches that this has left."""
    bundle, options = vllm_options(model, key, how)
    caches = ("--caches", f"{bundle}.caches")
    yield vllm_part(f"{shape} {key} cold", "stock", (*options, *caches, "--empty-caches"), 240)
    yield vllm_part(f"{shape} {key} stock", "stock", (*options, *caches), 180)


def vllm_options(model: Path, key: str, how: str) -> tuple[Path, tuple[str, ...]]:
    bundle = Path(f"{model}.{key.replace(' ', '-')}")
    return bundle, ("--model", str(model), "--bundle", str(bundle), "--compile", how)


def gpu_tests(check: Check, out: Path) -> None:
    """The tests marked gpu; their report is a part's result like any other."""
    log, left = out / "gpu-tests.log", min(_TESTS_S, check.left_s)
    if left < 5:
        check.keep("gpu tests", {"failed": "the minutes were used up"})
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/runtime/gpu"]
    evidence = {"PROBE_EVIDENCE": str(out.resolve())} if (out / "probe/probe.json").exists() else {}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environ(), **evidence},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = ended(process, left)
    end = log.read_text(errors="replace").strip().splitlines()[-1:]
    check.keep("gpu tests", {"status": status, "end": end} if status == 0 else {"failed": f"status {status}: {end}"})
    print(f"          gpu tests: {end}", flush=True)


def probe(check: Check, out: Path) -> None:
    """Run the probe, unless its results are there. Whatever it finds, the run goes on."""
    report, seconds = out / "probe/probe.json", min(SECONDS, check.left_s - 30)
    if not report.exists():
        if seconds < 5:
            check.keep("probe", {"failed": "the minutes were used up"})
            return
        command = [sys.executable, "-m", "benchmarks.gpu.probe", "--out", str(out), "--seconds", str(seconds)]
        try:
            subprocess.run(
                [*command, *(["--dry-run"] if check.dry_run else [])],
                cwd=ROOT, env=environ(), timeout=seconds + 30, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            check.keep("probe", {"failed": str(error)[:300]})
            return
    try:
        check.keep("probe", {"rows": json.loads(report.read_text())["rows"]})
    except (OSError, ValueError, KeyError) as error:
        check.keep("probe", {"failed": f"it left no results: {error}"})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, choices=_ALL, action="append", help="which; more than once; all")
    parser.add_argument("--out", type=Path, required=True, help="results.json (added to), logs, report.html")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/medusa-gpu"), help="checkpoints and bundles, to be kept"
    )
    parser.add_argument("--kit", type=Path, help="an archive of benchmarks.gpu.kit, with packages that are not here")
    parser.add_argument("--minutes", type=float, help=f"for all of it; later parts are left out (default: {MINUTES})")
    parser.add_argument("--shape", action="append", default=[], help="of the models; more than once; all of the run's")
    parser.add_argument("--part", action="append", default=[], help="of the runs, such as captured; more than once")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    numbers = options.run or _ALL
    check = Check(
        options.out,
        options.work,
        dry_run=options.dry_run,
        budget_s=(options.minutes or sum(MINUTES[number] for number in numbers)) * 60 - _PACKING_S,
    )
    if options.kit is not None:
        unpack(options.kit, options.work / "kit")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(options.work / "kit"), os.environ.get("PYTHONPATH", "")])
        sys.path.append(str(options.work / "kit"))
    for package, lost in _WITHOUT.items():
        if importlib.util.find_spec(package) is None:
            print(f"          there is no {package} here: {lost}", flush=True)
    sys.path += ROOTS
    make_ahead(options.work, shapes_of(numbers, options.shape, dry_run=options.dry_run))
    for number in numbers:
        try:
            if number == 1 and not options.part:
                probe(check, options.out)
            shapes = shapes_of([number], options.shape, dry_run=options.dry_run)
            for lanes in steps(number, check, shapes):
                side_by_side(check, lanes, options.part)
            if number == 1 and not options.part and not options.dry_run:
                gpu_tests(check, options.out)
        except Exception as error:  # noqa: BLE001 - a full disk, say: the next run may still bring something back
            check.keep(f"run {number}", {"failed": f"{type(error).__name__}: {error}"})
        bring_back(check, options.out, number, options.work)
    for process in _writers:  # one may write a checkpoint that nothing needs any more
        process.kill()
    print("\n".join(lines(check.results)))
    return int(any("failed" in found for found in check.results.values()))


def side_by_side(check: Check, lanes: Sequence[Iterator[Part]], only: Sequence[str]) -> None:
    """Run the parts of each lane one after the other, and the lanes at the same time."""

    def run_all(lane: Iterator[Part]) -> None:
        for part in lane:
            if not only or part.name in only:
                check.run(part)

    with ThreadPoolExecutor(max(len(lanes), 1)) as pool:
        for done in [pool.submit(run_all, lane) for lane in lanes]:
            done.result()


def bring_back(check: Check, out: Path, number: int, work: Path) -> None:
    """Write the report of everything so far, and the run's tar, with the bundles of graphs that it made."""
    from benchmarks.gpu.figures import report

    try:
        (out / "report.html").write_text(report(check.results))
        (out / "summary.txt").write_text("\n".join(lines(check.results)) + "\n")
        print(f"          {pack(out, f'run-{number}.tar.gz', beside=work.glob('*.graphs'))}", flush=True)
    except Exception as error:  # noqa: BLE001 - what was measured is in results.json
        print(f"          no report of run {number}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
