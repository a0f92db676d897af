"""Fetch the same object with our prefetcher, bare sockets and other packages: ``python -m benchmarks.fetch``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from medusa_adapters.bench.result import Result, Target, targets_table
from medusa_runtime.errors import ConfigError, CorruptError, MissingPackageError

from benchmarks import command_line
from benchmarks.fetch.checkpoint import BUCKET, KEY, ServedCheckpoint, make_checkpoint
from benchmarks.fetch.client import Job
from benchmarks.fetch.peers import INSTALL
from benchmarks.fetch.sample import Contestant, Sample
from benchmarks.origin import NGINX_HINT, VARIANTS, Origin, Variant, nginx_path

UNITS = {"mb_per_s": "MB/s", "cpu_s": "s/GB", "extra_mb": "MB", "connections": "connections", "s": "s"}
_OURS = ("medusa", "medusa-fresh")
_IMPORT = "import-torch"
# Bare sockets are the bound. How many are needed to reach it depends on the bandwidth of one connection.
_RAW_THREADS = {"plain": (2, 4), "tls": (2, 4), "limited": (16,), "latency": (2, 4)}


@dataclass(frozen=True)
class Plan:
    """What to measure.

    ``runs`` is the number of rounds, ``only`` the rows to measure (all if it is empty), and ``peer_pythons`` has pairs
    of a peer's name and its interpreter. With ``builtin_origin``, the origin is not nginx.
    """

    runs: int = 5
    size_bytes: int = 1_000_000_000
    variants: tuple[Variant, ...] = VARIANTS
    only: tuple[str, ...] = ()
    peer_pythons: tuple[tuple[str, str], ...] = ()
    builtin_origin: bool = False

    def wants(self, name: str) -> bool:
        return not self.only or name in self.only


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="rounds; each takes one sample of every row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    parser.add_argument("--size-gb", type=float, default=1.0, metavar="GB", help="bytes to fetch, in 10^9")
    names = ",".join(variant.name for variant in VARIANTS)
    parser.add_argument("--variants", default=names, metavar="LIST", help=f"the origin's variants ({names})")
    parser.add_argument("--only", default="", metavar="LIST", help=f"only these: {', '.join(row_names())}")
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PATH", help="a peer's interpreter; may be repeated"
    )
    parser.add_argument("--builtin-origin", action="store_true", help="do not use nginx though it is installed")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the medians, and the ratios with their targets. Raises ConfigError for a bad option."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fetch", description=(__doc__ or "").partition(":")[0])
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    result = measure(plan_of(arguments))
    print(result.table())
    targets = find_targets(result)
    if targets:
        print("\n" + targets_table(targets))
    if arguments.json:
        result.write(arguments.json)
    return 0


def plan_of(arguments: argparse.Namespace) -> Plan:
    variants = {variant.name: variant for variant in VARIANTS}
    pythons = []
    for text in arguments.peer_python:
        name, _, path = text.partition("=")
        if name not in INSTALL or not shutil.which(path):
            raise ConfigError(
                f"--peer-python {text!r}: expected NAME=PATH with one of {', '.join(INSTALL)}, and a program"
            )
        pythons.append((name, path))
    if arguments.runs < 1 or arguments.size_gb <= 0:
        raise ConfigError(f"--runs {arguments.runs} --size-gb {arguments.size_gb:g}: both must be above zero")
    return Plan(
        runs=arguments.runs,
        size_bytes=int(arguments.size_gb * 1e9),
        variants=tuple(variants[name] for name in command_line.names("--variants", arguments.variants, variants)),
        only=command_line.names("--only", arguments.only, row_names()),
        peer_pythons=tuple(pythons),
        builtin_origin=arguments.builtin_origin,
    )


def measure(plan: Plan) -> Result:
    """Run the whole plan. Its processes and files are removed afterwards, also after Ctrl-C or SIGTERM."""
    result = Result()
    if not plan.builtin_origin and not nginx_path():
        _say(NGINX_HINT)
    with _stops_on_sigterm(), tempfile.TemporaryDirectory(prefix="medusa-bench-", dir=_memory_folder(plan)) as folder:
        checkpoint = make_checkpoint(Path(folder, "root"), plan.size_bytes)
        for variant in plan.variants:
            with Origin(checkpoint.root, Path(folder), variant, builtin=plan.builtin_origin) as origin:
                _say(f"{variant.name}: {checkpoint.size_bytes / 1e9:.2f} GB from {origin.server} on loopback")
                _measure_variant(plan, checkpoint, origin, result)
    return result


def find_targets(result: Result) -> list[Target]:
    """Return the ratios that have a target, as far as both sides were measured."""
    wanted = (
        ("mb_per_s", "medusa", "raw", 0.85, True, "into touched memory, bandwidth over raw sockets"),
        (
            "mb_per_s",
            "medusa-fresh",
            "raw-populate",
            0.85,
            True,
            "into fresh memory, over raw sockets with populated pages",
        ),
        ("mb_per_s", "medusa", "runai-model-streamer", 3.0, True, "bandwidth over runai-model-streamer"),
        ("cpu_s", "medusa", "runai-model-streamer", 0.5, False, "CPU over runai-model-streamer"),
        ("mb_per_s", "medusa-tls", "raw-tls", 0.9, True, "TLS, bandwidth over raw TLS"),
        ("s", f"{_IMPORT}-beside", f"{_IMPORT}-alone", 1.15, False, "import torch beside the prefetcher, over alone"),
    )
    found = [
        Target(text, ratio, bound, at_least)
        for metric, name, other, bound, at_least, text in wanted
        if (ratio := result.ratio(metric, name, other)) is not None
    ]
    speed, connections = result.median("medusa-limited", "mb_per_s"), result.median("medusa-limited", "connections")
    if speed and connections:
        found.append(Target("limited, bandwidth over connections x 100 MB/s", speed / (connections * 100), 0.9))
    extra = result.median("medusa", "extra_mb")
    if extra:
        found.append(Target("private memory of the prefetcher, over 64 MB", extra / 64, 1.0, at_least=False))
    return found


def _measure_variant(plan: Plan, checkpoint: ServedCheckpoint, origin: Origin, result: Result) -> None:
    job = Job(
        url=origin.url, bucket=BUCKET, key=KEY, size_bytes=checkpoint.size_bytes, data_start=checkpoint.data_start,
        ca_file=str(origin.ca_file) if origin.ca_file else None,
    )  # fmt: skip
    everybody = [who for who in _contestants(plan, origin.variant) if _verified(who, job, checkpoint)]
    samples: dict[str, list[Sample]] = defaultdict(list)
    connections: dict[str, list[float]] = defaultdict(list)
    imports: dict[str, list[float]] = defaultdict(list)
    for number in range(plan.runs):
        # Every other round is in reverse, so that no contestant always meets the machine in the same state.
        for who in everybody if number % 2 == 0 else reversed(everybody):
            before = origin.connections()
            samples[who.name].append(who.sample(_job_for(who, job)))
            if before is not None:
                connections[who.name].append((origin.connections() or 0) - before)
            _say(f"  {number + 1}/{plan.runs} {who.name}: {samples[who.name][-1].mb_per_s:,.0f} MB/s")
        if plan.wants(_IMPORT) and origin.variant.name == "plain" and _has_torch():
            imports[f"{_IMPORT}-alone"].append(_import_torch_s())
            imports[f"{_IMPORT}-beside"].append(_import_torch_s(job))
    suffix = "" if origin.variant.name == "plain" else f"-{origin.variant.name}"
    for name, taken in _best_raw(samples).items():
        result.add(name + suffix, "mb_per_s", UNITS["mb_per_s"], [sample.mb_per_s for sample in taken])
        result.add(name + suffix, "cpu_s", UNITS["cpu_s"], [sample.cpu_s for sample in taken])
        if name in _OURS:
            result.add(name + suffix, "extra_mb", UNITS["extra_mb"], [sample.private_mb for sample in taken])
            result.add(name + suffix, "connections", UNITS["connections"], connections[name])
    for name, seconds in imports.items():
        result.add(name, "s", UNITS["s"], seconds)


def _contestants(plan: Plan, variant: Variant) -> list[Contestant]:
    pythons = dict(plan.peer_pythons)
    plain = variant.name == "plain"
    found = [Contestant("medusa", "ours", "medusa")]
    found += [Contestant("medusa-fresh", "ours", "medusa", fresh=True)] if plain else []
    found += [Contestant(f"raw/{n}", "raw", "raw", threads=n) for n in _RAW_THREADS[variant.name]]
    found += [Contestant(f"raw-populate/{n}", "raw", "raw-populate", threads=n) for n in (2, 4)] if plain else []
    found += [Contestant(name, "peers", name, python=pythons.get(name, sys.executable)) for name in INSTALL]
    return [who for who in found if plan.wants(who.name.partition("/")[0])]


def row_names() -> tuple[str, ...]:
    return (*_OURS, "raw", "raw-populate", *INSTALL, _IMPORT)


def _job_for(who: Contestant, job: Job) -> Job:
    return replace(job, threads=who.threads, fresh=who.fresh)


def _verified(who: Contestant, job: Job, checkpoint: ServedCheckpoint) -> bool:
    """Return whether the client is installed.

    Its bytes are compared once, outside the timing. Raises CorruptError if they are wrong.
    """
    try:
        crc = who.sample(replace(_job_for(who, job), verify=True)).crc
    except MissingPackageError as error:
        _say(f"  left out: {error}")
        return False
    if crc != checkpoint.crc:
        raise CorruptError(
            f"{who.name} fetched other bytes than were served: CRC-32 {crc:#x}, expected {checkpoint.crc:#x}"
        )
    return True


def _best_raw(samples: Mapping[str, list[Sample]]) -> dict[str, list[Sample]]:
    """Keep, for each client, only the number of threads with the best median: ``name/threads`` becomes ``name``."""
    best: dict[str, list[Sample]] = {}
    for label, taken in samples.items():
        name = label.partition("/")[0]
        if name not in best or _middle(taken) > _middle(best[name]):
            best[name] = taken
    return best


def _middle(samples: Sequence[Sample]) -> float:
    return sorted(sample.mb_per_s for sample in samples)[len(samples) // 2]


def _import_torch_s(job: Job | None = None) -> float:
    """Return the seconds of `python -c "import torch"`, if there is a job while our prefetcher fetches it."""
    if job:
        job = replace(job, fresh=True, beside_imports=True)
    with tempfile.TemporaryDirectory() as folder:
        beside = Contestant("medusa", "ours", "medusa").start(job, Path(folder)) if job else None
        try:
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True, stdin=subprocess.DEVNULL)
            seconds = time.perf_counter() - began
            if beside:
                beside.communicate()
        finally:
            if beside:
                beside.kill()
                beside.wait()
    return seconds


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def _memory_folder(plan: Plan) -> str | None:
    """Return a folder in tmpfs if it has room, so that no write-back disturbs the samples; otherwise None."""
    folder = "/dev/shm"
    fits = os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > plan.size_bytes * 1.1
    return folder if fits else None


@contextmanager
def _stops_on_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    command_line.run(main)
