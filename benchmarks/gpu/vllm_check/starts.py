"""Starts vLLM in this process: with our worker, loader and graphs, or as vLLM does it by itself."""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from medusa_runtime.config import Settings
from medusa_runtime.device.context import DeviceContext
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.state.restore import BundleRestorer
from medusa_runtime.timeline import Timeline

# A start of ours and one of vLLM's own must give the same bits, because both run the same kernels on the same inputs.
# On a CPU without products of 16 bits this holds only with vLLM's own products: ours sum in another order.
SETTINGS = Settings(
    engine="vllm", max_concurrency=256, max_waiting=512, max_model_len=2048, max_batched_tokens=4096, state="none",
    kernels="library",
)  # fmt: skip
_LONGEST_S = 120.0  # of one batch
SHARE = 0.4  # so that two starts share a GPU
_ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",  # vLLM would ask the network which address this machine has
    "VLLM_CPU_KVCACHE_SPACE": "1",  # of a dry run
}


def settings_for(model: str, compile_mode: str, *, dry_run: bool, share: float = SHARE) -> Settings:
    """Settings with a KV cache of fixed size. ``compile_mode`` is as ``--compile``.

    ``share`` of the GPU's memory has to be free: vLLM says so otherwise.
    """
    given = replace(SETTINGS, model=model, compile=compile_mode)
    if dry_run:
        return replace(given, max_concurrency=8, max_model_len=64, kv_cache_mb=4, threads=1, device="cpu")
    return replace(given, kv_cache_mb=8192, device="cuda", vllm_args=flags(share))


def replaced() -> dict[str, str]:
    """Return the extensions of vLLM that are replaced by a stand-in, with the reason. vLLM was imported before."""
    stand_in = getattr(sys.modules.get("sitecustomize"), "stand_in", None)
    return dict(stand_in.replaced) if stand_in is not None else {}


def flags(share: float) -> str:
    """Return the flags of vLLM, which would use all of the GPU, and attention that may not be here."""
    attention = " --attention-backend TRITON_ATTN" if any("flash_attn" in name for name in replaced()) else ""
    return f"--gpu-memory-utilization {share}{attention}"


def import_vllm(settings: Settings, region: Region) -> None:
    """Import vLLM and the module of the model, as a zygote does before an engine is forked."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from medusa_vllm.imports import import_model, preimport

    preimport(settings, region)
    if settings.model:
        for architecture in json.loads((Path(settings.model) / "config.json").read_text())["architectures"]:
            import_model(architecture)


class Start(Protocol):
    """A started vLLM, whose model has been loaded and whose graphs are there."""

    loading_s: float

    @property
    def stages(self) -> dict[str, float]:
        """The seconds of each stage so far."""

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Let these prompts be continued as one batch, greedily, and return the token ids of each."""

    def in_engine(self, work: Callable[[], Any]) -> Any:
        """Call a function between two steps, in the thread that runs them."""


class OurStart:
    def __init__(self, engine: Any, timeline: Timeline, loading_s: float) -> None:
        self._engine, self._timeline, self.loading_s = engine, timeline, loading_s
        self._number = 0

    @property
    def stages(self) -> dict[str, float]:
        return seconds_of(self._timeline)

    @property
    def runner(self) -> Any:
        return runner_of(self._engine._core)

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        errors: list[str] = []
        done = threading.Semaphore(0)

        def sink(row: int) -> Callable[[Delta], None]:
            def take(delta: Delta) -> None:
                found[row].extend(delta.token_ids)
                if delta.finish_reason is not None:
                    if delta.finish_reason not in ("length", "stop"):
                        errors.append(f"{delta.finish_reason}: {delta}"[:300])
                    done.release()

            return take

        everyone = threading.Event()
        self._engine._inbox.post(everyone.wait)  # the next step has to have the whole batch
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        try:
            for row, prompt in enumerate(prompts):
                self._number += 1
                self._engine.add(GenerateRequest(f"r{self._number}", tuple(prompt), params), sink(row))
        finally:
            everyone.set()
        for _ in prompts:
            if not done.acquire(timeout=_LONGEST_S):
                raise TimeoutError(f"a batch of {len(prompts)} was not done after {_LONGEST_S:.0f} s")
        if errors:
            raise RuntimeError(f"{len(errors)} of {len(prompts)} requests ended: {errors[0]}")
        return found

    def in_engine(self, work: Callable[[], Any]) -> Any:
        return self._engine._inbox.call(work)


@contextmanager
def our_start(settings: Settings) -> Iterator[OurStart]:
    """Start vLLM as an instance does. The loading phase begins when everything is imported."""
    region, timeline = Region.create(), Timeline.create("engine")
    # As an instance's engine and its zygote: the device's context is made beside the imports, and what was imported is
    # frozen, because vLLM collects garbage several times in a start.
    context = DeviceContext(timeline=timeline) if settings.device == "cuda" else None
    with timeline.stage("import"):
        import_vllm(settings, region)
        gc.collect()
        gc.freeze()
    if context is not None:
        context.wait()
    from medusa_vllm.engine import VllmEngine

    began = time.monotonic()
    fetching = timeline.named("prefetcher")
    fetch = threading.Thread(
        target=prefetch,
        args=(region, settings.model),
        kwargs={"settings": settings, "timeline": fetching, "bundle": BundleRestorer(settings, fetching)},
    )
    fetch.start()
    stop, broke = threading.Event(), []
    engine = VllmEngine(region, settings, timeline)
    engine.mounts_when_idle = False  # vLLM's own start, with which this one is compared, has no server, either

    def run() -> None:
        try:
            engine.run(stop)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for it
            broke.append(error)

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    try:
        engine.wait_ready()
        yield OurStart(engine, timeline, time.monotonic() - began)
    finally:
        stop.set()
        thread.join(_LONGEST_S)
        fetch.join(_LONGEST_S)
        engine.close()
    if broke:
        raise broke[0]


class StockStart:
    def __init__(self, core: Any, tokens: dict[str, list[int]], loading_s: float, stages: dict[str, float]) -> None:
        self._core, self._tokens, self.loading_s, self.stages = core, tokens, loading_s, stages
        self._number = 0

    @property
    def runner(self) -> Any:
        return runner_of(self._core)

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        from medusa_vllm.core_request import request_of
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        names = []
        for prompt in prompts:
            self._number += 1
            names.append(f"r{self._number}")
            self._tokens[names[-1]] = []
            request = request_of(names[-1], list(prompt), params)
            self._core.add_request(self._core.preprocess_add_request(request)[0])
        while self._core.has_work():
            self._core.run_step()
        return [self._tokens.pop(name) for name in names]

    def in_engine(self, work: Callable[[], Any]) -> Any:
        return work()


@contextmanager
def stock_start(settings: Settings) -> Iterator[StockStart]:
    """Start vLLM's own worker and loader, with the same sizes of graphs, and its own measuring of the KV cache."""
    region = Region.create()
    import_vllm(settings, region)
    from medusa_vllm.configuration import create
    from medusa_vllm.gpu.arguments import gpu_arguments
    from medusa_vllm.serving.arguments import engine_arguments
    from medusa_vllm.serving.core import PlainCore
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_num_seqs": settings.max_concurrency,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "max_model_len": settings.max_model_len,
        "seed": 0,
        "disable_log_stats": True,
        **engine_arguments(shlex.split(settings.vllm_args or "")),
    }
    stages: Mapping[str, float] = {}
    if current_platform.is_cpu():
        arguments["enforce_eager"] = True
    else:
        from .timed_worker import TimedWorker

        stages = TimedWorker.stages
        arguments |= gpu_arguments(settings, compiled=settings.compile == "always")
        arguments["worker_cls"] = f"{TimedWorker.__module__}.{TimedWorker.__name__}"
    tokens: dict[str, list[int]] = {}

    def collect(outputs: Any) -> None:
        for output in outputs.outputs:
            tokens[output.request_id].extend(output.new_token_ids)

    began = time.monotonic()
    core = PlainCore(create(arguments), UniProcExecutor, None, collect)  # type: ignore[arg-type] # nothing posts to it
    try:
        yield StockStart(core, tokens, time.monotonic() - began, dict(stages))
    finally:
        core.shutdown()


def runner_of(core: Any) -> Any:
    return core.model_executor.driver_worker.worker.model_runner


def seconds_of(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of each stage; those of a stage that was recorded several times together."""
    found: dict[str, float] = {}
    for stage in timeline.stages():
        found[stage.name] = found.get(stage.name, 0.0) + (stage.end_ns - stage.start_ns) / 1e9
    return found
