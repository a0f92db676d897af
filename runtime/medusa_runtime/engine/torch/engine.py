"""The engine of this repository: small, and serving before its weights are there.

    add ─▶ inbox ─▶ scheduler ─spans▶ runner ─logits▶ sampler ─token▶ completion ─delta▶ sink

The first prefill starts as soon as there is a request; the gates of the loader hold it layer by layer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import torch

from ...config import Settings
from ...errors import EngineError, MedusaError, ModelError, RequestError
from ...limits import cpu_count
from ...load.applier import Applier
from ...load.loader import Loader
from ...load.part_applier import PartApplier
from ...models.layer_range import LayerRange, require_ranges
from ...region.reader import Region
from ...timeline import Timeline
from ..base import EngineInfo, GenerateRequest
from ..checkpoint_files import read_config, read_eos_token_ids
from ..gpu.device import Gpu, graphs_of, open_gpu
from ..serving.inbox import Inbox
from ..serving.requests import Requests, Sink
from ..serving.sequence import Sampled, Sequence, Span
from ..serving.tokenizer import Tokenizer
from ..serving.validation import check_token_ids
from ..structured.constraints import Constraints
from .adapters import Adapters
from .kv_cache import BLOCK_TOKENS, KvCache, KvShape
from .kv_size import kv_plan, tokens_before
from .runner import CpuRunner, Runner
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

_IDLE_S = 0.2  # how often an idle engine looks at its stop event, which a signal handler may set
_MOST_FAILED_STEPS = 3
_DECODES = 8  # the first steps without a prefill, whose time a cluster's predictions learn


class TorchEngine:
    """Continuous batching over one model. Construction waits for the checkpoint's index, not its weights.

    With ``--layers`` it loads these layers only, and a subclass has the others run elsewhere. Subclasses may use the
    attributes and methods with one underscore.
    """

    def __init__(self, region: Region, settings: Settings, timeline: Timeline, gpu: Gpu | None = None) -> None:
        """Run the model on ``gpu``, or with ``--device cuda`` on the first GPU there is; else on the CPU."""
        self._region = region
        self._settings = settings
        self._timeline = timeline
        gpu = gpu or open_gpu(settings, timeline)
        with timeline.stage("config"):
            torch.set_num_threads(settings.threads or cpu_count())
            config = read_config(region)
            if gpu is not None and config.is_foreign:
                raise ModelError(
                    f"{config.architecture} runs by transformers, which the torch engine does on CPUs only; expected "
                    "--device cpu, or --engine vllm"
                )
            if gpu is not None and config.quantization is not None:
                raise ModelError(
                    f"the weights are quantized ({config.quantization}), which the torch engine runs on CPUs only; "
                    "expected --device cpu, or --engine vllm"
                )
        dtype = config.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        config = replace(config, dtype=dtype)
        with timeline.stage("skeleton", architecture=config.architecture):
            self._model = config.model()
        self._dtype = dtype
        self.layers = LayerRange(0, config.num_layers, config.num_layers)
        if settings.layers is not None:
            require_ranges(self._model)
            self.layers = LayerRange.parse(settings.layers, config.num_layers)
        release = settings.host_weights == "release"
        link = gpu.link if gpu is not None else None
        self._loader = Loader(
            region,
            self._applier(),
            timeline=timeline,
            link=link,
            release=release and gpu is not None,
        )
        self._tokenizer = Tokenizer(region.file("tokenizer.json"), timeline)
        with timeline.stage("kv_plan") as detail:
            free = gpu.free_beside(self._loader) if gpu is not None else None
            cached = self._cached_layers()
            sizes = gpu.graph_sizes(settings.max_concurrency) if gpu is not None else ()
            plan = kv_plan(
                region,
                config,
                settings,
                dtype,
                device_free_bytes=free,
                layers=len(cached),
                graph_sizes=sizes,
                tokens_before=tokens_before(timeline) if gpu is None else None,
            )
            shape = KvShape.of(config, dtype, len(cached))
            self._cache = (
                KvCache(shape, plan.blocks, first_layer=cached.start)
                if gpu is None
                else KvCache(shape, gpu.blocks(plan.blocks), gpu.memory)
            )
            detail |= {"tokens": plan.tokens, "source": plan.source}
        self.runner: Runner = (
            CpuRunner(self._model, self._cache)
            if gpu is None
            else gpu.runner(
                self._model,
                self._cache,
                self._loader,
                settings.max_concurrency,
                plan.max_model_len,
                timeline,
                graphs_of(region, settings),
            )
        )
        eos = read_eos_token_ids(region, config)
        self.info = EngineInfo("torch", config.architecture, config.vocab_size, plan.max_model_len, eos, plan.tokens)
        self._scheduler = Scheduler(
            self._cache.blocks,
            max_concurrency=settings.max_concurrency,
            max_batched_tokens=settings.max_batched_tokens,
        )
        self._inbox = Inbox()
        self._requests = Requests(settings, self._tokenizer, self.info, timeline, self._released)
        self._constraints = Constraints(
            lambda: region.file("tokenizer.json"),
            vocab_size=config.vocab_size,
            eos_token_ids=eos,
            rows=settings.max_concurrency,
        )
        self._on_gpu = gpu is not None
        self._adapters = Adapters(
            self._model,
            dtype,
            timeline,
            most_rank=settings.max_lora_rank,
            base_loaded=self._loader.wait,
            post=self._inbox.post,
            begin=self._scheduler.add,
            fail=lambda sequence, error: self._requests.end(sequence, "error", error),
        )
        self._steps = self._failed_steps = 0
        self._decodes_ns: list[int] = []
        self._load_error: MedusaError | None = None
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        self._watcher.start()

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        adapter = None if request.adapter is None else self._adapters.find(request.adapter)
        asked = request.params.structured_outputs
        sequence = self._requests.prepare(request, sink)
        sequence.adapter = adapter
        sequence.constraint = None if asked is None else self._constraints.open(asked)
        try:
            self._requests.admit(sequence)
        except MedusaError:
            if sequence.constraint is not None:
                self._inbox.post(sequence.constraint.close)
            raise
        self._inbox.post(lambda: self._begin(sequence))

    def add_adapter(self, name: str, region: Region) -> None:
        """Begin to load an adapter from its region, which the engine takes over. Requests that name it wait for it."""
        if not self._on_gpu and self.layers.first and self.layers.last:
            self._adapters.add(name, region)
            return
        region.close()
        where = "on a GPU" if self._on_gpu else "by a worker that holds some of the layers"
        error = f"adapters are not supported {where}; expected --device cpu, or --engine vllm -- --enable-lora"
        self._adapters.refuse(name, RequestError(error, "model"))

    def wait_adapter(self, name: str) -> dict[str, Any]:
        """Wait for an adapter to load; returns its numbers of layers and bytes. Raises RequestError, StorageError."""
        return self._adapters.wait(name)

    def drop_adapter(self, name: str) -> bool:
        """Forget an adapter, and return whether it was there. Requests that use it go on."""
        return self._adapters.drop(name)

    def cancel(self, request_id: str) -> None:
        sequence = self._requests.get(request_id)
        if sequence is not None:
            sequence.cancelled = True  # at once, so that the step that is running gives it no token
            self._inbox.post(lambda: self._requests.end(sequence, "cancelled"))

    def run(self, stop: threading.Event) -> None:
        with contextlib.closing(self._inbox), self._requests.serving(), torch.inference_mode():
            while not stop.is_set():
                self._inbox.handle()
                self._check_loaded()
                if not self._turn():
                    self._inbox.wait(0.0 if self.runner.use_idle_time() else _IDLE_S)

    def wait_ready(self) -> None:
        self._watcher.join()
        self._check_loaded()

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def detokenize(self, token_ids: list[int]) -> str:
        check_token_ids("token_ids", token_ids, self.info)
        return self._tokenizer.decode(token_ids)

    def stats(self) -> dict[str, Any]:
        return self._requests.stats(len(self._scheduler.running), self._cache.blocks.used * BLOCK_TOKENS) | {
            "preemptions_total": self._scheduler.preemptions,
            "steps_total": self._steps,
            "adapters": len(self._adapters),
        }

    def close(self) -> None:
        self._inbox.close()
        self._constraints.close()
        self._loader.close()
        self._watcher.join()

    def _cached_layers(self) -> range:
        """The layers whose keys and values this engine's cache has room for."""
        return range(self.layers.start, self.layers.stop)

    def _applier(self, *, rest: bool = False) -> Applier:
        """Return what applies this engine's layers; with ``rest`` the other ones."""
        if self.layers.first and self.layers.last:
            return self._model.applier(self._dtype)
        return PartApplier(
            self._model,
            lambda name: self.layers.needs(self._model, name),
            dtype=self._dtype,
            quantization=self._model.config.quantization,
            rest=rest,
        )

    # From here on: the thread of run, but for what says otherwise.

    def _watch(self) -> None:
        """Wait for the weights and the tokenizer, in a thread of its own."""
        try:
            self._loader.wait()
            self._tokenizer.wait()
        except MedusaError as error:
            self._load_error = error
        except Exception as error:  # noqa: BLE001 - wait_ready must hear of anything
            self._load_error = EngineError(f"the weights could not be applied: {type(error).__name__}: {error}")
            self._load_error.__cause__ = error
        self._inbox.post(lambda: None)

    def _check_loaded(self) -> None:
        """Raise what made loading impossible, if that is known already. Called by any thread."""
        if self._load_error is not None:
            raise self._load_error

    def _turn(self) -> bool:
        """Do what can be done now, for one step at most, and return whether there was anything to do."""
        spans = self._scheduler.schedule()
        if spans:
            self._step(spans)
        return bool(spans)

    def _released(self, sequence: Sequence) -> None:
        """Free what a sequence has held that will not go on."""
        self._scheduler.remove(sequence)
        if sequence.constraint is not None:
            sequence.constraint.close()

    def _begin(self, sequence: Sequence) -> None:
        if not sequence.cancelled and not self._adapters.hold(sequence):
            self._scheduler.add(sequence)

    def _step(self, spans: list[Span]) -> None:
        start_ns = time.monotonic_ns()
        try:
            spans = self._adapters.arrange(spans)
            self._constraints.begin(spans)
            logits, sequences = self.runner.step(spans)
            self._adapters.check(spans)
            sampled = [] if logits is None else self._sample(logits, sequences)
        except MedusaError:
            raise
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= _MOST_FAILED_STEPS:
                raise
            logger.exception("a step failed; its %d requests end", len(spans))
            failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            for span in spans:
                self._requests.end(span.sequence, "error", failure)
            return
        self._failed_steps = 0
        self._give(spans, sequences, sampled, start_ns, in_turn=True)

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """The tokens of these rows, each one that its sequence's grammar allows."""
        for ended in self._constraints.apply(logits, sequences):
            ended.sequence.cancelled = True
            self._requests.end(ended.sequence, "error" if ended.error else "stop", ended.error)
        return self.runner.sample(logits, sequences)

    def _give(
        self,
        spans: list[Span],
        sequences: list[Sequence],
        sampled: list[Sampled],
        start_ns: int,
        *,
        in_turn: bool = False,
    ) -> None:
        """Deliver the tokens of a step that began at ``start_ns``. ``in_turn``: the next step continues these."""
        self._constraints.take(sequences, sampled, ask=in_turn)
        self._steps += 1
        if self._steps == 1:
            self._timeline.record(
                "first_forward", start_ns, time.monotonic_ns(), tokens=sum(s.stop - s.start for s in spans)
            )
        elif len(self._decodes_ns) < _DECODES and all(0 < span.start == span.stop - 1 for span in spans):
            self._decodes_ns.append(time.monotonic_ns() - start_ns)
            if len(self._decodes_ns) == _DECODES:
                middle = sorted(self._decodes_ns)[_DECODES // 2 - 1 : _DECODES // 2 + 1]
                self._timeline.mark("decodes", step_ms=sum(middle) / 2e6)
        for sequence, sampled_token in zip(sequences, sampled, strict=True):
            if not sequence.cancelled:
                self._requests.give(sequence, sampled_token)
