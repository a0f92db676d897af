"""Workers in the nodes of a laboratory: how to start them, send them requests, and read their timelines."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from medusa_cluster.group.ranges import ModelBytes, layer_settings, split
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.container_limits import cpu_count
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.engine.client import TokenStream
from medusa_runtime.errors import EngineError

from benchmarks.pipeline.options import Options
from benchmarks.worker_processes import WorkerProcesses

_PORT = 9100
_START_S = 120.0
_PROMPT = tuple(100 + 7 * number % 900 for number in range(4096))
_LINK_BYTES_PER_S = 50e6
_CORES = 0.9  # the share of the machine for three or more nodes; the rest is for the clients and the origin


@dataclass
class Stream:
    """The tokens of one request, and the time of each in seconds since ``began``."""

    began: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times[0]

    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Site:
    """A laboratory whose origin serves the model, as a context manager."""

    def __init__(self, options: Options, nodes: int) -> None:
        self.options = options
        self.link_bytes_per_s = options.link_bytes_per_s or _LINK_BYTES_PER_S
        self._stack = ExitStack()
        self.laboratory = Laboratory(
            nodes,
            LinkSpeed(self.link_bytes_per_s),
            cpus=options.cpus or _CORES * cpu_count() / max(nodes, 3),
            origin={"model": options.model},
            origin_link=LinkSpeed(max(nodes, 4) * 4 * self.link_bytes_per_s),
        )
        checkpoint = open_checkpoint(str(options.model))
        with contextlib.closing(checkpoint.store):
            self.bytes = ModelBytes.of(checkpoint.index)
            self.total_bytes = checkpoint.index.total_bytes

    def __enter__(self) -> Self:
        self._stack.enter_context(self.laboratory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return f"{self.laboratory.origin_url}/model"

    def cpu_s(self, number: int) -> float:
        """Return the CPU seconds of all processes of a node. Nodes are numbered from 0."""
        ticks = 0
        for pid in self.laboratory.processes(self.laboratory.nodes[number]):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def ranges(self, size: int) -> list[tuple[int, int]]:
        return split(self.bytes, size)

    def part_bytes(self, size: int) -> int:
        """Return the bytes of the largest part when the model is split over ``size`` workers."""
        parts = []
        for start, stop in self.ranges(size):
            ends = (self.bytes.entry if start == 0 else 0) + (self.bytes.exit if stop == len(self.bytes.layers) else 0)
            parts.append(sum(self.bytes.layers[start:stop]) + ends)
        return max(parts)


class Workers(WorkerProcesses):
    """Workers of one model that start together. The context manager ends them.

    The first worker is on node number ``first``, and each other one on the next node. ``plans`` and ``layers`` have the
    group's plan and the range of layers for each worker, or None. ``urls`` are stores other than the origin, such as
    ``url_1`` for rank 1. ``began`` is when the first worker started (``time.monotonic``).
    """

    def __init__(
        self, site: Site, plans: list[dict[str, Any] | None], layers: list[str | None], first: int = 0, **urls: str
    ) -> None:
        super().__init__()
        self.site = site
        self.began = time.monotonic()
        try:
            for rank, plan in enumerate(plans):
                self._start(site.laboratory.nodes[first + rank], plan, layers[rank], urls.get(f"url_{rank}"))
            if site.options.warm:
                self._go()
            self.clients = [self.connect(rank) for rank in range(len(plans))]
        except BaseException:
            self.close()
            raise

    @classmethod
    def group(cls, site: Site, size: int, then: str = "stay", **plan: Any) -> Workers:
        """Start a group over ``size`` nodes, or a single instance if it is 1. ``url_1`` is another store for rank 1.

        ``then`` is what the group becomes: "stay", "down" (one instance) or "up" (an instance on each node).
        """
        urls = {name: plan.pop(name) for name in tuple(plan) if name.startswith("url_")}
        if size == 1:
            return cls(site, [None], [None])
        leader = f"{site.laboratory.address(site.laboratory.nodes[0])}:{_PORT}"
        common = {"group": secrets.token_hex(4), "token": secrets.token_hex(16), "size": size, "leader": leader}
        common |= {"then": then, "form_s": _START_S, "silent_s": 30.0, **plan}
        plans = [
            {**common, "rank": rank, "bind": site.laboratory.address(site.laboratory.nodes[rank])}
            for rank in range(size)
        ]
        live = plan.get("mode") == "live"
        layers: list[str | None] = [None] * size if live else [*layer_settings(site.ranges(size))]
        return cls(site, list(plans), layers, **urls)

    def _start(self, node: str, plan: dict[str, Any] | None, layers: str | None, url: str | None) -> None:
        options = self.site.options
        environment = {**os.environ, "MEDUSA_DEVICE": "cpu", "MEDUSA_THREADS": "1", "MEDUSA_KV_CACHE_MB": "512"}
        environment["MEDUSA_MAX_BATCHED_TOKENS"] = str(options.batch_tokens)  # so that a queue is a queue, not one step
        # Groups of all sizes read in the same way. Otherwise the fetch would try more connections to a slow store.
        environment["MEDUSA_CONNECTIONS"] = "4" if url is None else "1"
        self.start(
            url or self.site.url,
            ["--engine", options.engine, *(["--warm"] if options.warm else [])],
            layers=layers,
            plan=plan,
            environment=environment,
            popen=partial(self.site.laboratory.popen, node),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _go(self) -> None:
        """Wait until all workers are warm, and let them start."""
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            if process.stdout.readline() != b"warm\n":
                raise EngineError(f"worker {rank} did not start: {self.log(rank)}")
        self.began = time.monotonic()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.close()

    def begin(
        self, rank: int = 0, *, prompt: int, count: int, number: int = 0, so_far: Sequence[int] = (), **params: Any
    ) -> TokenStream:
        """Request ``count`` tokens after a prompt of ``prompt`` tokens and the tokens of an answer ``so_far``.

        ``number`` makes the prompts of requests different.
        """
        given = SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params})
        tokens = (number % 50 + 3, *_PROMPT[: prompt - 1], *so_far)
        return self.clients[rank].generate(GenerateRequest(secrets.token_hex(8), tokens, given))

    def stream(self, rank: int = 0, *, prompt: int, count: int, began: float | None = None, **params: Any) -> Stream:
        """Send a request and read the whole answer. Times count from ``began``, or else from the request."""
        made = Stream(time.monotonic() if began is None else began)
        follow(made, self.begin(rank, prompt=prompt, count=count, **params))
        return made

    def stats(self, rank: int = 0) -> dict[str, Any]:
        return self.clients[rank].stats()

    def close(self) -> None:
        super().close()
        for pipe in (pipe for process in self.processes for pipe in (process.stdin, process.stdout)):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a worker ended before it had read a line
                    pipe.close()


def follow(made: Stream, stream: TokenStream) -> None:
    """Read ``stream`` to its end, and add its tokens and their times to ``made``."""
    for delta in stream:
        made.tokens += delta.token_ids
        made.times += [time.monotonic() - made.began] * len(delta.token_ids)
