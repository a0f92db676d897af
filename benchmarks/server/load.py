"""Many streams at once on one worker, and how long probes take meanwhile.

    python -m benchmarks.server.load --streams 128 --json out/load.json

Serves a function that streams an item every ``--every-ms``, or with ``--model`` a model; opens all streams together,
and asks /readyz, on a new connection each time as kubelet does, until the last stream has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from medusa_adapters.bench.result import Result, Target, targets_table
from medusa_adapters.bench.served_instance import ServedInstance, serve_command

_FUNCTION = """
import time

def handle(request):
    asked = request.json
    for number in range(asked["items"]):
        time.sleep(asked["every_s"])
        yield {"item": number}
"""
_BETWEEN_PROBES_S = 0.02
_READYZ_P99_MS = 100.0


@dataclass
class Sample:
    """One run: seconds to each stream's first event and to its end, of each probe, and what went wrong."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    probe_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextlib.contextmanager
def serving(arguments: argparse.Namespace) -> Iterator[int]:
    """A `medusa serve` that is ready; yields its port."""
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        handler = Path(folder, "handler.py")
        handler.write_text(_FUNCTION)
        what = ["--model", arguments.model] if arguments.model else ["--handler", f"{handler}:handle"]
        limits = ["--max-concurrency", str(arguments.streams), "--log-level", "warning"]
        with ServedInstance(serve_command(*what, *limits), {"TMPDIR": folder}) as instance:
            instance.wait_ready(every_s=0.05)
            yield instance.port


def get(port: int, path: str) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status


def stream(port: int, arguments: argparse.Namespace, start: threading.Barrier, sample: Sample) -> None:
    """One client: all of its stream, whose last event must be [DONE]."""
    if arguments.model:
        path, body = "/v1/completions", {"prompt": "This", "max_tokens": arguments.items, "ignore_eos": True}
        body["stream"] = True
    else:
        path, body = "/", {"items": arguments.items, "every_s": arguments.every_ms / 1000}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        start.wait()
        began = time.monotonic()
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            events = [response.readline()]
            sample.first_s.append(time.monotonic() - began)
            events += [line for line in response if line.strip()]
        except OSError as error:
            sample.errors.append(repr(error))
            return
        sample.whole_s.append(time.monotonic() - began)
        if response.status != 200 or events[-1] != b"data: [DONE]\n" or b'{"error"' in b"".join(events):
            sample.errors.append(f"{response.status} {events[-1]!r}")
        elif not arguments.model and len(events) != arguments.items + 1:
            sample.errors.append(f"{len(events)} events")


def probe(port: int, end: Connection) -> None:
    """Probe on new connections until the pipe says stop, in a process that does not read the streams, too."""
    times_s: list[float] = []
    errors: list[str] = []
    while not end.poll(_BETWEEN_PROBES_S):
        began = time.monotonic()
        try:
            if (status := get(port, "/readyz")) != 200:
                errors.append(f"a probe got {status}")
        except OSError as error:
            errors.append(f"a probe: {error!r}")
        times_s.append(time.monotonic() - began)
    end.send((times_s, errors))


def run(arguments: argparse.Namespace) -> Sample:
    sample, start = Sample(), threading.Barrier(arguments.streams)
    spawn = multiprocessing.get_context("spawn")
    with serving(arguments) as port:
        ours, theirs = spawn.Pipe()
        prober = spawn.Process(target=probe, args=(port, theirs), daemon=True)
        prober.start()
        with ThreadPoolExecutor(arguments.streams) as pool:
            for future in [pool.submit(stream, port, arguments, start, sample) for _ in range(arguments.streams)]:
                future.result()
        ours.send(None)
        sample.probe_s, errors = ours.recv()
        sample.errors += errors
        prober.join()
    return sample


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def targets(result: Result, name: str) -> list[Target]:
    """Times and counts that issue texts promise; Target's number is one of these here, not a ratio."""
    found = [
        ("ms of /readyz at p99 meanwhile, median of the runs", "readyz p99", _READYZ_P99_MS),
        ("streams and probes that failed, median of the runs", "errors", 0.0),
    ]
    medians = [(text, result.median(name, metric), bound) for text, metric, bound in found]
    return [Target(text, value, bound, at_least=False) for text, value, bound in medians if value is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--items", type=int, default=40, help="events (with --model: tokens) of each stream")
    parser.add_argument("--every-ms", type=float, default=50.0)
    parser.add_argument("--model", help="stream from this checkpoint instead of from a function")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result, failed = Result(), 0
    samples = [run(arguments) for _ in range(arguments.runs)]
    name = f"{arguments.streams} streams"
    result.add(name, "wall", "s", [max(sample.whole_s, default=0.0) for sample in samples])
    result.add(name, "worst first byte", "s", [max(sample.first_s, default=0.0) for sample in samples])
    for percent in (50, 99):
        result.add(name, f"readyz p{percent}", "ms", [percentile(s.probe_s, percent) * 1e3 for s in samples])
    result.add(name, "errors", "count", [float(len(sample.errors)) for sample in samples])
    print(result.table(), targets_table(targets(result, name)), sep="\n\n")
    for sample in samples:
        failed += len(sample.errors)
        for error in sample.errors[:5]:
            print(error, file=sys.stderr)
    if arguments.json is not None:
        result.write(arguments.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
