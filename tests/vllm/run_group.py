"""Run by tests with an interpreter that has vLLM: groups of vLLM workers, forked from a process that has imported it.

python run_group.py SCENARIO CHECKPOINT FOLDER → one JSON line on standard output
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import medusa_vllm  # noqa: F401  makes the engines known
from medusa_cluster.group import worker
from medusa_cluster.group.ranges import ModelBytes, layer_settings, split
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import GenerateRequest, SamplingParams, StructuredOutputs
from medusa_runtime.engine.client import EngineClient, TokenStream
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.process import die_with_parent
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

sys.path.append(str(Path(__file__).parents[1] / "support/servers"))
from certificates import make_certificates
from slow_origin import SlowOrigin

PATIENCE_S = 120.0
PROMPT = (3, 14, 15, 9, 26, 5)
LONG = tuple(7 + number * 13 % 240 for number in range(300))  # more than a step takes
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.95}
PENALIZED: dict[str, Any] = {"temperature": 0.8, "seed": 6, "presence_penalty": 0.9, "frequency_penalty": 0.4}
PROBABLE: dict[str, Any] = {"temperature": 0.0, "logprobs": 3}
REGEX: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 8,
    "ignore_eos": False,
    "structured_outputs": StructuredOutputs("regex", "([a-z]{1,5} [0-9]{2}; ){100}"),
}
SCHEMA: dict[str, Any] = {
    "temperature": 0.0,
    "ignore_eos": False,
    "structured_outputs": StructuredOutputs(
        "json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 200}'
    ),
}
REQUESTS = (
    *((PROMPT, GREEDY), (PROMPT, SEEDED), (PROMPT, PENALIZED), (LONG, SEEDED), (LONG[:40], GREEDY)),
    *((PROMPT, PROBABLE), (PROMPT, REGEX), (LONG[:40], SCHEMA)),
)
SETTINGS = Settings(kv_cache_mb=64, max_concurrency=8, max_batched_tokens=128, threads=1, device="cpu", state="none")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Started:
    """One worker, or an instance without a group, in processes of its own."""

    def __init__(self, name: str, folder: Path, **settings: Any) -> None:
        self.path = str(folder / f"{name}.sock")
        self.timeline = folder / f"{name}.jsonl"
        self.log = folder / f"{name}.log"
        chosen = Settings(**{**vars_of(SETTINGS), "model": settings.pop("model"), "engine": "vllm-group", **settings})
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                die_with_parent(parent)
                os.setpgid(0, 0)
                log = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
                os.dup2(log, 1)
                os.dup2(log, 2)
                status = worker.run(chosen, self.path, str(self.timeline), warm=True)
            except BaseException:
                logging.exception("a worker failed")
            finally:
                os._exit(status)
        self.client = EngineClient(self.path)
        until(lambda: os.path.exists(self.path))
        self.client.start()

    def ask(self, prompt: tuple[int, ...], count: int, **params: Any) -> TokenStream:
        self.asked = getattr(self, "asked", 0) + 1
        given = SamplingParams(**{"max_tokens": count, "ignore_eos": True, **params})
        return self.client.generate(GenerateRequest(f"r{self.asked}", prompt, given))

    def processes(self) -> dict[str, int]:
        """The processes below this one, by their names."""
        found, left = {}, [self.pid]
        while left:
            pid = left.pop()
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                left += map(int, task.read_text().split())
            found[Path(f"/proc/{pid}/comm").read_text().strip()] = pid
        return found

    def stages(self) -> list[str]:
        return [json.loads(line)[0] for line in self.timeline.read_text().splitlines()]

    def end(self) -> None:
        self.client.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return
                time.sleep(0.05)


def vars_of(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def until(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come to pass")
        time.sleep(0.01)


class Group:
    """A group of two workers, whose file can be changed."""

    def __init__(
        self,
        checkpoint: str,
        folder: Path,
        layers: tuple[str, ...] = ("0:2", "2:4"),
        urls: tuple[str, ...] = (),
        **plan: Any,
    ) -> None:
        """``urls``: where each worker has the checkpoint from."""
        self.folder = folder
        self.plan = {
            "group": "g", "token": "secret", "size": len(layers), "then": "stay", "silent_s": 20.0, "form_s": 60.0,
            "leader": f"127.0.0.1:{free_port()}", **plan,
        }  # fmt: skip
        self.workers = []
        for rank, one in enumerate(layers):
            self.write(rank, **({"full": False} if rank and urls else {}))
            model = urls[rank] if urls else checkpoint
            self.workers.append(Started(f"worker-{rank}", folder, model=model, group=str(self.file(rank)), layers=one))

    def file(self, rank: int) -> Path:
        return self.folder / f"group-{rank}.json"

    def write(self, rank: int, **changes: Any) -> None:
        part = self.file(rank).with_suffix(".part")
        part.write_text(json.dumps({**self.plan, "rank": rank, **changes}))
        part.rename(self.file(rank))

    @property
    def leader(self) -> Started:
        return self.workers[0]

    def size(self) -> int:
        return int(self.leader.client.stats()["workers"])

    def end(self) -> None:
        for one in self.workers:
            one.end()


def answers(started: Started, count: int, meanwhile: Callable[[], object] = lambda: None, after: int = 0) -> Any:
    """The tokens of all requests, asked at once; ``meanwhile`` is called when each has ``after`` tokens."""
    print(f"{time.monotonic():.1f} s: {started.path} is asked", file=sys.stderr, flush=True)
    streams = [started.ask(prompt, count, **params) for prompt, params in REQUESTS]
    tokens: list[list[int]] = [[] for _ in streams]
    called = False
    reasons = [""] * len(streams)
    logprobs: list[float] = []
    while not all(reasons):
        for place, stream in enumerate(streams):
            if reasons[place]:
                continue
            delta = stream.get(PATIENCE_S)
            assert delta is not None
            tokens[place] += delta.token_ids
            logprobs += [value for one in delta.logprobs for value in (one.logprob, *(top[2] for top in one.top))]
            reasons[place] = delta.finish_reason or ""
        if not called and min(map(len, tokens)) >= after:
            called = True
            meanwhile()
    return {"tokens": tokens, "reasons": reasons, "logprobs": logprobs}


def alone(checkpoint: str, folder: Path, count: int) -> Any:
    """Return what one instance answers."""
    started = Started("alone", folder, model=checkpoint)
    try:
        started.client.wait_ready(PATIENCE_S)
        return answers(started, count)
    finally:
        started.end()


def same(checkpoint: str, folder: Path) -> Any:
    """A group of 3 + 1 layers answers over TLS; then its leader takes over while it answers, and answers alone."""
    count = 60
    expected = alone(checkpoint, folder, count)
    files = zip(("ca_file", "cert_file", "key_file"), map(str, make_certificates(folder)), strict=True)
    group = Group(checkpoint, folder, ("0:3", "3:4"), **dict(files))
    try:
        group.leader.client.wait_ready(PATIENCE_S)
        sizes = [group.size()]
        by_group = answers(group.leader, count)
        during = answers(group.leader, count, lambda: group.write(0, then="down"), 20)
        until(lambda: group.size() == 1)
        after = answers(group.leader, count)
        sizes.append(group.size())
    finally:
        group.end()
    answered = {"expected": expected, "group": by_group, "during": during, "after": after, "sizes": sizes}
    return answered | {"stages": group.leader.stages()}


def killed(checkpoint: str, folder: Path) -> Any:
    """Each worker in turn is killed while its group answers; then a group that never comes together."""
    count = 80
    found: dict[str, Any] = {"expected": alone(checkpoint, folder, count)}
    for name in ("rank-0", "worker-1", "stopped"):
        (folder / name).mkdir()
        group = Group(checkpoint, folder / name, silent_s=3.0 if name == "stopped" else 20.0)
        try:
            group.leader.client.wait_ready(PATIENCE_S)

            def strike(name: str = name, group: Group = group) -> None:
                owner = group.leader if name == "rank-0" else group.workers[1]
                victim = owner.processes()["group-rank-0" if name == "rank-0" else "engine"]
                os.kill(victim, signal.SIGSTOP if name == "stopped" else signal.SIGKILL)

            found[name] = answers(group.leader, count, strike, 10)
            found[f"{name}-size"] = group.size()
        finally:
            group.end()
        found[f"{name}-stages"] = group.leader.stages()
    (folder / "none").mkdir()
    group = Group(checkpoint, folder / "none", ("0:2",), size=2, form_s=1.0)
    try:
        found["unformed"] = answers(group.leader, count)
    finally:
        group.end()
    return found


def up(checkpoint: str, folder: Path) -> Any:
    """Both workers become instances."""
    count = 60
    group = Group(checkpoint, folder, then="up")
    try:
        during = answers(group.leader, count)
        until(lambda: group.size() == 1)
        other = group.workers[1]
        other.client.wait_ready(PATIENCE_S)
        return {"expected": alone(checkpoint, folder, count), "during": during, "other": answers(other, count)}
    finally:
        group.end()


def first(checkpoint: str, folder: Path) -> Any:
    """When the first token comes from cold, behind links on which fetching takes its time: one worker, and two."""
    path = Path(checkpoint)
    size = (path / "model.safetensors").stat().st_size
    rate = size / float(os.environ.get("FETCH_S", "6"))
    region = Region.create()
    prefetch(region, checkpoint, settings=SETTINGS, timeline=Timeline.create("test"))
    ranges = split(ModelBytes.of(region.wait_index()), 2)
    found: dict[str, Any] = {"size": size, "ranges": ranges}
    for count in (1, 2):
        (folder / str(count)).mkdir()
        nodes = [SlowOrigin(path, rate, shared=True) for _ in range(count)]
        for node in nodes:
            threading.Thread(target=node.serve_forever, daemon=True).start()
        began, at = time.monotonic(), f"{count} workers"
        if count == 1:
            workers = [Started("one", folder / "1", model=nodes[0].url)]
        else:
            group = Group(checkpoint, folder / "2", tuple(layer_settings(ranges)), tuple(one.url for one in nodes))
            workers = group.workers
        with workers[0].ask(PROMPT, 2, **GREEDY) as stream:
            delta = stream.get(PATIENCE_S)
            assert delta is not None
            found[at] = {"first_s": time.monotonic() - began, "token": delta.token_ids[0]}
            stream.get(PATIENCE_S)
        if count == 2:
            until(lambda leader=nodes[0]: leader.sent >= size * 0.99)  # the leader fetches the others' layers behind it
        found[at]["sent"] = [one.sent for one in nodes]
        for one in workers:
            one.end()
    return found


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is not the answer
    scenario, checkpoint, folder = sys.argv[1:]
    from medusa_cluster.group.vllm.engine import preimport

    preimport(Settings(engine="vllm-group", group="-", device="cpu"), Region.create())
    gc.collect()
    gc.freeze()  # as the zygote does
    answer = {"same": same, "killed": killed, "up": up, "first": first}[scenario](checkpoint, Path(folder))
    os.write(out, json.dumps(answer).encode() + b"\n")
    os._exit(0)
