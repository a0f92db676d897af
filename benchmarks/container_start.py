"""Measure what a container adds to a cold start: ``python -m benchmarks.container_start --json FILE``.

`medusa serve` with this interpreter and `podman run` of the image serve the same model and request in turn. Both are
timed from before the exec of their command to the first token at a client that polls. ``livez_ms`` counts from the exec
of medusa itself, also in the container.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from medusa_adapters.bench.coldstart.contestants import Medusa, Question
from medusa_adapters.bench.openai_client import stream
from medusa_adapters.bench.result import Result, Target, targets_table
from medusa_adapters.bench.served_instance import ServedInstance
from medusa_runtime.errors import ConfigError, MedusaError

IMAGE = "localhost/medusa-runtime:slim"
# Replaces the image's entrypoint, and prints when it executes medusa. create_ms is the time of `podman run` until then.
AT_EXEC = 'date +%s%N; exec medusa "$0" "$@"'
CONFINED = ("--read-only", "--tmpfs", "/tmp:mode=1777", "--cap-drop", "all", "--user", "1000")
ADDED_S = 0.5
LIVEZ_MS = 300.0


class Sample(NamedTuple):
    """One start. ``exec_ns`` is when medusa was executed (CLOCK_MONOTONIC)."""

    started_ns: int
    exec_ns: int
    livez_ns: int
    token_ns: int
    text: str


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.container_start", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--image", default=IMAGE, help=f"default {IMAGE}")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint; default: a new one, llama-57m")
    parser.add_argument("--runs", type=int, default=7, help="starts of each, after one that warms caches")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    if shutil.which("podman") is None:
        raise ConfigError("podman is not installed: apt-get install podman runc, then `make image`")
    with checkpoint(arguments.model) as folder, podman_settings():
        question = Question(model=str(folder), folder=str(folder), prompt="The quick brown fox", max_tokens=8)
        samples = take_turns(arguments.image, question, arguments.runs)
    result = Result()
    for name, taken in samples.items():
        result.add(name, "ttft_s", "s", [(sample.token_ns - sample.started_ns) / 1e9 for sample in taken])
        result.add(name, "livez_ms", "ms", [(sample.livez_ns - sample.exec_ns) / 1e6 for sample in taken])
        result.add(name, "create_ms", "ms", [(sample.exec_ns - sample.started_ns) / 1e6 for sample in taken])
    print(result.table(), targets_table(targets(result)), sep="\n\n")
    if arguments.json:
        result.write(arguments.json)
    return 0


def take_turns(image: str, question: Question, runs: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = defaultdict(list)
    for _ in range(runs + 1):
        for name, taken in (("outside", outside(question)), ("container", inside(image, question))):
            samples[name].append(taken)
    texts = {sample.text for taken in samples.values() for sample in taken}
    if len(texts) > 1:
        raise MedusaError(f"the starts gave different answers: {sorted(texts)}")
    return {name: taken[1:] for name, taken in samples.items()}


def targets(result: Result) -> list[Target]:
    """Return the promised differences and times. The number of a Target is a time here, not a ratio."""
    inside_s, outside_s = result.median("container", "ttft_s"), result.median("outside", "ttft_s")
    found = []
    if inside_s is not None and outside_s is not None:
        text = "seconds that a container adds from its start to the first token"
        found.append(Target(text, inside_s - outside_s, ADDED_S, at_least=False))
    for name in ("container", "outside"):
        livez_ms = result.median(name, "livez_ms")
        if livez_ms is not None:
            found.append(Target(f"ms from exec to /livez, {name}", livez_ms, LIVEZ_MS, at_least=False))
    return found


def outside(question: Question) -> Sample:
    with Medusa().start(question) as instance:
        return ask(instance, question, lambda: instance.started_ns)


def inside(image: str, question: Question) -> Sample:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    name = f"medusa-bench-{os.getpid()}"
    command = ["podman", "run", "--rm", "--name", name, "--network", "host", *CONFINED, "--entrypoint", "sh"]
    command += ["--volume", f"{question.folder}:/model:ro", "--env", "MEDUSA_LOG_LEVEL=warning", image, "-c", AT_EXEC]
    command += ["serve", "--model", "/model", "--host", "127.0.0.1", "--port", str(port)]
    try:
        with ServedInstance(command, port=port) as instance:
            offset_ns = time.time_ns() - time.monotonic_ns()
            return ask(instance, question, lambda: _said_ns(instance) - offset_ns)
    finally:
        subprocess.run(["podman", "rm", "--force", "--time", "5", name], capture_output=True, check=False)


def _said_ns(instance: ServedInstance) -> int:
    """Return the time of the exec, which the container prints on a line of its own."""
    return next(int(line) for line in instance.output().splitlines() if line.isdigit())


def ask(instance: ServedInstance, question: Question, exec_ns: Callable[[], int]) -> Sample:
    """Poll /livez, and then request tokens immediately. The instance holds the request until the model is loaded."""
    with instance.explained_failures(), closing(instance.connect()) as connection:
        connection.request("GET", "/livez")
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise instance.failure("is listening but not alive")
        livez_ns = time.monotonic_ns()
        answer = stream(connection, question.body)
    return Sample(instance.started_ns, exec_ns(), livez_ns, answer.first_token_ns, answer.text)


@contextmanager
def checkpoint(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model {folder}: expected a folder with a config.json, found none")
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="medusa-bench-") as scratch:
        made = Path(scratch) / "llama-57m"
        command = [sys.executable, "-m", "benchmarks.make_checkpoint", "--shape", "llama-57m", "--out", str(made)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        Path(scratch).chmod(0o755)  # the container runs as another user
        yield made


@contextmanager
def podman_settings() -> Iterator[None]:
    """Use podman's configuration from images/podman.py, so that this runs wherever the image was built."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("images_podman", Path(__file__).parent.parent / "images/podman.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory(prefix="medusa-podman-") as scratch:
        os.environ.update(module.environment(Path(scratch)))
        yield


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MedusaError as error:
        sys.exit(f"{error}")
