"""One cold inference in a process of its own: ``python -m benchmarks.cicada.sample`` reads what to do from stdin.

As in Cicada §4.1 the container is up when the request comes: torch is imported and the process that fetches is forked.
It prints ``ready``, reads one line of JSON (a Request), and answers with one line of JSON (an Answer).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.process import share_cores
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline


@dataclass(frozen=True)
class Request:
    """``url`` is the checkpoint's folder, or its address at an origin; ``connections`` None: as many as pay."""

    model: str
    strategy: str
    url: str
    connections: int | None = None


@dataclass(frozen=True)
class Answer:
    """``stages``: (name, process, start_s, end_s, layer) from the request on; ``digest`` is of the output's bytes."""

    seconds: float
    digest: str
    stages: list[tuple[str, str, float, float, str]]


def main() -> None:
    region, timeline = Region.create(), Timeline.create("function")
    reader, writer = os.pipe()
    share_cores()  # as a served function's processes do, for every strategy alike
    child = os.fork()
    if not child:
        os.close(writer)
        _fetch(reader, region, timeline.named("prefetcher"))
    os.close(reader)
    if os.environ.get("MEDUSA_BENCH_SERVED"):
        from medusa_runtime.imports.lazy_torch import make_handlers_import_lean

        make_handlers_import_lean(Settings().torch_import)
    from benchmarks.cicada import baselines, strategies  # torch, a second or two
    from benchmarks.cicada.workloads import workload

    _prepare()
    print("ready", flush=True)
    line = sys.stdin.readline()
    if line:
        request = Request(**json.loads(line))
        chosen = workload.workload(request.model)
        answer = _answer(request, chosen, (strategies, baselines), (region, timeline, writer))
        print(json.dumps(asdict(answer)), flush=True)
        sys.stdin.readline()  # stay until memory was looked at
    with suppress(OSError):
        os.close(writer)
    os.waitpid(child, 0)


def _fetch(reader: int, region: Region, timeline: Timeline) -> None:
    """The prefetcher's process: waits for an address, fetches, and ends."""
    import medusa_runtime.storage.http.store  # noqa: F401  10 ms, and the container is up before the request

    with os.fdopen(reader) as lines:
        line = lines.readline()
    if line:
        url, connections = json.loads(line)
        prefetch(region, url, settings=Settings(connections=connections), timeline=timeline)
    os._exit(0)


def _prepare() -> None:
    """What a container has done before a request comes, for every strategy alike."""
    import torch
    from medusa_runtime.models.layers.linear import Linear
    from torch import nn

    # The runtime's own projections take no initial values; a user's module does, so here they do.
    Linear.reset_parameters = nn.Linear.reset_parameters  # type: ignore[method-assign]
    torch.tensor([0.0])  # asks for numpy
    with torch.inference_mode():  # the threads of the intra-op pool
        torch.randn(256, 256) @ torch.randn(256, 256)


def _answer(request: Request, chosen: Any, modules: tuple[Any, Any], parts: tuple[Region, Timeline, int]) -> Answer:
    import torch

    (strategies, baselines), (region, timeline, writer) = modules, parts
    torch.set_default_dtype(chosen.dtype)
    kept = None
    if request.strategy in baselines.BEFORE:
        kept = baselines.BEFORE[request.strategy](chosen, Path(_local(request.url, timeline)))
    start = time.monotonic_ns()
    path = None
    if request.strategy in strategies.OURS:
        os.write(writer, json.dumps([request.url, request.connections]).encode() + b"\n")
    else:
        path = _local(request.url, timeline)
    with torch.inference_mode():
        run = {**strategies.STRATEGIES, **baselines.BASELINES}[request.strategy]
        output = run(strategies.Job(chosen, path, timeline, region, kept))
        end = time.monotonic_ns()
        digest = hashlib.sha256(output.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    if not output.isfinite().all() or output.float().std() == 0:
        raise RuntimeError(f"{chosen.name}: the output is not that of a working model")
    stages = [
        (s.name, s.process, (s.start_ns - start) / 1e9, (min(s.end_ns, end) - start) / 1e9, s.detail.get("unit", ""))
        for s in timeline.stages()
        if start <= s.start_ns <= end
    ]
    seconds = (end - start) / 1e9
    if request.strategy == "floor":  # what comes before is not its own
        seconds = next(last - first for name, _, first, last, _ in stages if name == "forward")
    return Answer(seconds, digest, stages)


def _local(url: str, timeline: Timeline) -> str:
    """The file's path; from an origin it is downloaded first, as a program does that has no loader."""
    if "://" not in url:
        return f"{url}/model.safetensors"
    import tempfile
    from urllib.request import urlopen

    file = tempfile.NamedTemporaryFile(dir=os.environ["MEDUSA_BENCH_SCRATCH"], delete=False)  # noqa: SIM115
    with timeline.stage("retrieve"), file, urlopen(f"{url}/model.safetensors") as answer:
        while piece := answer.read(1 << 20):
            file.write(piece)
    return file.name


if __name__ == "__main__":
    main()
