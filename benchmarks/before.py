"""Compare this checkout's cold start, imports, fetch and liveness probe with those of an earlier checkout.

    git worktree add before REVISION && make -C before setup
    python -m benchmarks.before before/.venv/bin/python --model out/llama-57m
    python -m benchmarks.make_checkpoint --shape llama-1.6g --out out/llama-1.6g
    python -m benchmarks.before before/.venv/bin/python --model out/llama-1.6g --rows fetch,limited-fetch

The two samples of a pair run one after the other, in an order that changes with each pair. CPU seconds are those of all
processes. They vary less than seconds when others use the machine.

| row | what it does |
|---|---|
| start | serves the model from its files, up to the first token |
| import | `medusa --version` |
| fetch | `medusa fetch` from an origin on loopback, whose seconds are those that the command prints |
| limited-fetch | the same, where the origin gives each connection 100 MB/s |
| livez | `/livez` of a function without a model: one client that asks both in turn, and 16 that ask one of them |
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from medusa_adapters.bench.bytecode import compile_packages
from medusa_adapters.bench.coldstart.contestants import Medusa, Question
from medusa_adapters.bench.process import Process, cpu_s
from medusa_adapters.bench.result import Result, Target, targets_table
from medusa_adapters.bench.served_instance import ServedInstance, medusa_command, serve_command
from medusa_runtime.errors import ConfigError, MedusaError

from benchmarks import command_line
from benchmarks.origin import VARIANTS, Origin

_MOST_TIMES = 1.03
_JUDGED = ("ttft_s", "all_cpu_s", "wall_s", "cpu_s", "fetch_s", "median_ms", "p99_ms")
_ROWS = ("start", "import", "fetch", "limited-fetch", "livez")
_ORIGINS = {variant.name: variant for variant in VARIANTS}
_FUNCTION = "def handle(request):\n    return 'here'\n"
_PROBE = b"GET /livez HTTP/1.1\r\nHost: probe\r\n\r\n"
_ALONE, _TOGETHER, _CLIENTS = 300, 3000, 16

Sample = dict[str, float]


def main() -> int:
    arguments = parsed()
    if "://" not in arguments.model:
        arguments.model = str(Path(arguments.model).resolve())
        if not Path(arguments.model, "config.json").is_file():
            raise ConfigError(f"--model={arguments.model}: expected a folder with a checkpoint, found no config.json")
    elif others := set(arguments.rows) - {"start"}:
        raise ConfigError(f"--rows: expected start alone with a model in a store, found {', '.join(sorted(others))}")
    pythons = {"now": sys.executable, "before": arguments.python}
    for python in pythons.values():
        compile_packages(python)
    result = Result()
    targets: list[Target] = []
    for row in arguments.rows:
        with sampler(row, arguments.model, pythons) as sample:
            targets += compare(result, row, pythons, sample, arguments.pairs)
    print(result.table(), targets_table(targets), sep="\n\n")
    if arguments.json is not None:
        result.write(arguments.json)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON", help="the interpreter of the earlier checkout's environment")
    parser.add_argument("--model", required=True, metavar="DIR", help="the checkpoint to start with; a URL for start")
    parser.add_argument("--rows", type=rows, default=_ROWS, metavar="ROW,ROW", help=f"which of {', '.join(_ROWS)}")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="of each, after one that warms caches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    return parser.parse_args()


def rows(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if unknown := set(found) - set(_ROWS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(_ROWS)}, found {', '.join(sorted(unknown))}")
    return found


@contextlib.contextmanager
def sampler(row: str, model: str, pythons: dict[str, str]) -> Iterator[Callable[[str], Sample]]:
    """Yield a function that takes a sample of this row with a given interpreter."""
    if row == "start":
        yield partial(start, model=model)
    elif row == "import":
        yield partial(command, arguments=("--version",))
    elif row == "livez":
        with two_functions(pythons) as served:
            yield lambda python: probes(served, python)
    else:
        variant, folder = _ORIGINS["plain" if row == "fetch" else "limited"], Path(model)
        with (
            tempfile.TemporaryDirectory(prefix="m") as scratch,
            Origin(folder.parent, Path(scratch), variant, builtin=True) as origin,
        ):
            yield partial(command, arguments=("fetch", f"{origin.url}/{folder.name}"))


def compare(
    result: Result, what: str, pythons: dict[str, str], sample: Callable[[str], Sample], pairs: int
) -> list[Target]:
    """Measure pairs, add the rows of both checkouts to the result, and return the medians of the pairs' ratios."""
    taken: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in pythons}
    for number in range(pairs + 1):
        for name in pythons if number % 2 else reversed(pythons):
            for metric, value in sample(pythons[name]).items():
                taken[name][metric].append(value)
    targets = []
    for metric in taken["now"]:
        now, before = (taken[name][metric][1:] for name in pythons)
        for name, values in (("now", now), ("before", before)):
            result.add(f"{what}, {name}", metric, metric.rpartition("_")[2], values)
        if metric in _JUDGED:
            ratio = statistics.median(a / b for a, b in zip(now, before, strict=True))
            targets.append(Target(f"{what}: {metric}, times before", ratio, _MOST_TIMES, at_least=False))
    return targets


def start(python: str, model: str) -> Sample:
    """Run a cold start up to its first answer. Return its seconds, and the CPU seconds of each process until then."""
    question = Question(model, model, "The quick brown fox", max_tokens=1)
    with Medusa(python=python).start(question) as instance:
        answer = instance.completion(question.body)
        used: Sample = defaultdict(float)
        for pid, seconds in cpu_s(instance.tree()).items():
            with suppress(OSError):
                used[Path(f"/proc/{pid}/comm").read_text().strip() + "_cpu_s"] += seconds
    first_token_s = (answer.first_token_ns - instance.started_ns) / 1e9
    return {"ttft_s": first_token_s, "all_cpu_s": sum(used.values()), **used}


def command(python: str, arguments: tuple[str, ...]) -> Sample:
    """Run a `medusa` command to its end. Return its seconds and its CPU seconds."""
    with Process([*medusa_command(python), *arguments], {"MEDUSA_NODE_SOCKET": "none"}) as process:
        _, status, usage = os.wait4(process.pid, 0)
        seconds = process.since_start_s()
        process.process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            raise MedusaError(process.output())
        assert process.process.stdout
        own_s = re.search(rb"(?m)^fetched .* in ([0-9.]+) s", process.process.stdout.read())
        fetched = {"fetch_s": max(float(own_s[1]), 0.005)} if own_s else {}  # the command prints hundredths
        return {"wall_s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime, **fetched}


@contextlib.contextmanager
def two_functions(pythons: dict[str, str]) -> Iterator[dict[str, ServedInstance]]:
    """Serve the same function with each of the interpreters. Both only answer probes."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="m"))
        handler = Path(folder, "handler.py")
        handler.write_text(_FUNCTION)
        served = {}
        for python in pythons.values():
            served[python] = stack.enter_context(
                ServedInstance(
                    serve_command("--handler", f"{handler}:handle", "--log-level", "warning", python=python),
                    {"TMPDIR": folder, "MEDUSA_NODE_SOCKET": "none"},
                )
            )
            served[python].wait_ready()
        yield served


def probes(served: dict[str, ServedInstance], python: str) -> Sample:
    """Measure probes of one client with one connection (median), and of many clients that never pause (p99), in ms."""
    instance = served[python]
    before = cpu_s(instance.tree())
    with contextlib.closing(instance.connect()) as connection:
        alone = [_probe(connection) for _ in range(_ALONE)]
    together = sorted(_probes_together(instance.port))
    after = cpu_s(instance.tree())
    return {
        "median_ms": statistics.median(alone) * 1e3,
        "p99_ms": together[len(together) * 99 // 100] * 1e3,
        "cpu_s": sum(after.values()) - sum(before.values()),
    }


def _probe(connection: http.client.HTTPConnection) -> float:
    began = time.perf_counter()
    connection.request("GET", "/livez")
    response = connection.getresponse()
    response.read()
    assert response.status == 200, response.status
    return time.perf_counter() - began


def _probes_together(port: int) -> Iterator[float]:
    """Yield the seconds of each of many probes. Each client always has one probe under way."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        began: dict[socket.socket, float] = {}

        def ask(client: socket.socket) -> None:
            began[client] = time.perf_counter()
            client.sendall(_PROBE)

        for _ in range(_CLIENTS):
            client: socket.socket = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            selector.register(client, selectors.EVENT_READ, client)
            ask(client)
        left = _TOGETHER
        while left > 0:
            for key, _ in selector.select(60):
                client = key.data
                answer = client.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200 "), answer
                yield time.perf_counter() - began[client]
                left -= 1
                ask(client)


if __name__ == "__main__":
    command_line.run(main)
