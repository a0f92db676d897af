"""The torch engine: small, and able to serve before all of its weights have arrived.

    add ─▶ inbox ─▶ scheduler ─spans▶ runner ─logits▶ sampler ─token▶ completion ─delta▶ sink

The first prefill starts as soon as there is a request. At each layer, a gate holds it until the weights are applied.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...config import Settings
from ...container_limits import cpu_count
from ...errors import EngineError, MedusaError, RequestError
from ...load.applier import Applier
from ...load.loader import Loader
from ...load.part_applier import PartApplier
from ...models.layer_range import LayerRange, require_ranges
from ...region.reader import Region
from ...state.kinds import PROMPTS, file_name
from ...timeline import Timeline
from ..base import EngineInfo, GenerateRequest, PromptLogprobs
from ..checkpoint_files import check_for_gpu, read_config, read_eos_token_ids
from ..gpu.device import Gpu, bundled_graphs, full_gpu, is_full, open_gpu
from ..serving.cut import Cut
from ..serving.inbox import Inbox
from ..serving.prompt_scores import with_texts
from ..serving.requests import Requests, Sink
from ..serving.sequence import NO_TOKEN, SampledToken, Sequence, Span
from ..serving.tokenizer import Tokenizer
from ..structured.constraints import Constraints
from .adapters import Adapters
from .kv_cache import BLOCK_TOKENS, KvCache, KvShape
from .kv_size import kv_plan, most_states, previously
from .penalties import Adjustment
from .prefix_cache import prefix_cache
from .prompt_scoring import most_rows
from .recurrent_states import RecurrentStates
from .runner import CpuRunner, Runner
from .scheduler import Scheduler

if TYPE_CHECKING:
    from ...models import ModelConfig
    from ...state.kv_plan import KvPlan
    from ..gpu.runner import Weights
    from .recorded_blocks import RecordedBlocks

logger = logging.getLogger(__name__)

_IDLE_S = 0.2  # how often an idle engine looks at its stop event, which a signal handler may set
_MOST_FAILED_STEPS = 3
_NO_TOKEN_LEFT = (
    "expected a token that the request allows next, found none; with its other parameters, expected more "
    "allowed_token_ids or fewer bad_words"
)
_DECODES = 8  # how many of the first pure decode steps are timed; a cluster's predictions use their median


class TorchEngine:
    """Continuous batching over one model. Construction waits for the checkpoint's weight index, not for its weights.

    With ``--layers`` it loads only these layers, and a subclass runs the others in other processes. Subclasses may use
    the attributes and methods with one underscore.
    """

    def __init__(self, region: Region, settings: Settings, timeline: Timeline, gpu: Gpu | None = None) -> None:
        """Load the model onto ``gpu``, by default the first GPU if the device setting is "cuda", else the CPU.

        Raises ModelError for a model that this engine cannot run on that device.
        """
        self._region = region
        self._settings = settings
        self._timeline = timeline
        gpu = self._gpu = gpu or open_gpu(settings, timeline)
        with timeline.stage("config"):
            torch.set_num_threads(settings.threads or cpu_count())
            config = read_config(region.file, region.wait_index(), settings.dtype, settings.max_model_len)
            if gpu is not None:
                check_for_gpu(config)
        dtype = config.dtype
        with timeline.stage("skeleton", architecture=config.architecture):
            self._model = config.model()
            config = self._model.config  # which knows what the layers keep
        self._dtype = dtype
        self.layers = LayerRange(0, config.num_layers, config.num_layers)
        if settings.layers is not None:
            require_ranges(self._model)
            self.layers = LayerRange.parse(settings.layers, config.num_layers)
        applier = self._applier()
        self._loader = Loader(
            region,
            applier,
            timeline=timeline,
            link=None if gpu is None else gpu.link,
            release=self._releases,
        )
        self._tokenizer = Tokenizer(region.file("tokenizer.json"), timeline)
        with timeline.stage("kv_plan") as detail:
            plan, self._cache = self._plan_cache(config, applier)
            detail |= {"tokens": plan.tokens, "source": plan.source}
            states = self._cache.states
            if states is not None:
                detail["states"] = states.slots.blocks
        self.runner: Runner = (
            CpuRunner(self._model, self._cache) if gpu is None else self._gpu_runner(gpu, plan.max_model_len)
        )
        eos = read_eos_token_ids(region.file, config)
        self.info = EngineInfo("torch", config.architecture, config.vocab_size, plan.max_model_len, eos, plan.tokens)
        self._recorded = self._recorded_blocks()
        self._scheduler = Scheduler(
            self._cache.blocks,
            max_concurrency=settings.max_concurrency if states is None else states.slots.blocks,
            max_batched_tokens=settings.max_batched_tokens,
            most_scored_tokens=most_rows(config.vocab_size) if config.is_foreign else None,
            prefixes=prefix_cache(self._cache, settings.prefix_cache_mb, self._recorded) if states is None else None,
            slots=None if states is None else states.slots,
        )
        self._inbox = Inbox()
        self._requests = Requests(settings, self._tokenizer, self.info, timeline, self._release_sequence)
        self._constraints = Constraints(
            lambda: region.file("tokenizer.json"),
            vocab_size=config.vocab_size,
            eos_token_ids=eos,
            rows=settings.max_concurrency,
        )
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
        if self._recorded is not None:
            self._recorded.fetch(lambda: self._loader.applied, partial(self._inbox.post, lambda: None))

    def _plan_cache(self, config: ModelConfig, applier: Applier) -> tuple[KvPlan, KvCache]:
        """Plan the KV cache and allocate it. On a GPU, this waits until all weights have their addresses."""
        gpu, settings = self._gpu, self._settings
        cached = [layer for layer in config.attention_layers if layer in self._cached_layers()]
        shape = KvShape.of(config, self._dtype, len(cached))
        facts = (self._region, config, settings, self._dtype, applier)
        plan = partial(kv_plan, *facts, layers=len(cached))
        if gpu is None:
            count = (previously(self._timeline, "states") or most_states(*facts)) if config.states else 0
            planned = plan(
                previous_kv_tokens=previously(self._timeline, "tokens"),
                states_bytes=count * config.state_bytes(self._dtype),
            )
            states = RecurrentStates(config.states, self._dtype, count) if config.states else None
            return planned, KvCache(shape, planned.blocks, numbers=cached, states=states)
        planned = plan(
            device_free_bytes=gpu.free_bytes_beside_weights(self._loader),
            graph_sizes=gpu.graph_sizes(settings.max_concurrency) if self._caches_all_layers else (),
        )
        return planned, KvCache(shape, gpu.limit_blocks(planned.blocks), gpu.memory, numbers=cached)

    def _recorded_blocks(self) -> RecordedBlocks | None:
        """Return the recorded prompts. A GPU computes them faster than they come, and a group shares its steps.

        They have keys and values, but no states.
        """
        if self._gpu is not None or self._settings.prefix_cache_mb == 0 or self._settings.group is not None:
            return None
        if self._cache.states is not None:
            return None
        if self._settings.state == "none":  # the node agent's region may have them
            return None
        if self._settings.layers is not None or file_name(PROMPTS.name) not in self._region.file_names():
            return None
        from .recorded_blocks import recorded_blocks  # few starts have any

        return recorded_blocks(self._region, self._cache, self._model.config.longest)

    def _gpu_runner(self, gpu: Gpu, max_model_len: int) -> Runner:
        from ..gpu.runner import GpuRunner  # a start on a CPU does not import it

        return GpuRunner(
            gpu,
            self._model,
            self._cache,
            self._weights,
            max_concurrency=self._settings.max_concurrency,
            max_model_len=max_model_len,
            timeline=self._timeline,
            blueprints=bundled_graphs(self._region, self._settings),
            has_all_layers=self._caches_all_layers,
        )

    @property
    def _caches_all_layers(self) -> bool:
        return len(self._cached_layers()) == self.layers.total

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        adapter = None if request.adapter is None else self._adapters.find(request.adapter)
        form = request.params.structured_outputs
        sequence = self._requests.open(request, sink)
        sequence.adapter = adapter
        if not sequence.is_plain or request.params.min_tokens:
            sequence.adjustment = Adjustment(sequence, self.info.vocab_size)
        if form is not None:
            with self._requests.withdrawing(sequence):
                sequence.constraint = self._constraints.open(form, lambda: not sequence.cancelled)
        self._inbox.post(lambda: self._begin(sequence))

    def add_adapter(self, name: str, region: Region) -> None:
        """Start loading an adapter from its region, which the engine takes over. Requests that name it wait for it."""
        if self._gpu is None and self.layers.is_first and self.layers.is_last:
            self._adapters.add(name, region)
            return
        region.close()
        where = "on a GPU" if self._gpu is not None else "by a worker that holds some of the layers"
        error = f"adapters are not supported {where}; expected --device cpu, or --engine vllm -- --enable-lora"
        self._adapters.refuse(name, RequestError(error, "model"))

    def wait_adapter(self, name: str, cancelled: threading.Event | None = None) -> dict[str, Any]:
        """Wait for an adapter, and return its numbers of layers and bytes. ``cancelled`` ends the wait when it is set.

        Raises RequestError, StorageError and EngineError.
        """
        return self._adapters.wait(name, cancelled)

    def drop_adapter(self, name: str) -> bool:
        """Forget an adapter, and return whether it was there. Requests that use it go on."""
        return self._adapters.drop(name)

    def cancel(self, request_id: str) -> None:
        sequence = self._requests.get(request_id)
        if sequence is not None:
            sequence.cancelled = True  # now, so that a running step delivers no token for it
            self._inbox.post(lambda: self._requests.end(sequence, "cancelled"))

    def run(self, stop: threading.Event) -> None:
        self.runner.prepare()
        with contextlib.closing(self._inbox), self._requests.serving(), torch.inference_mode():
            while not stop.is_set():
                self._inbox.run_pending()
                self._check_loaded()
                if not self._run_next_step():
                    self._inbox.wait(0.0 if self._use_idle_time() else _IDLE_S)

    def wait_ready(self) -> None:
        self._watcher.join()
        self._check_loaded()

    def tokenize(self, text: str, add_special_tokens: bool = True, **cut: Any) -> list[int]:
        return self._tokenizer.tokenize(text, add_special_tokens, self.info, Cut(**cut))

    def detokenize(self, token_ids: list[int]) -> str:
        return self._tokenizer.detokenize(token_ids, self.info)

    def with_texts(self, found: PromptLogprobs) -> PromptLogprobs:
        """Return the log-probabilities of a delta with the texts of their tokens, which takes up to seconds."""
        return with_texts(found, self._tokenizer)

    def stats(self) -> dict[str, Any]:
        return self._requests.stats(len(self._scheduler.running), self._cache.blocks.used * BLOCK_TOKENS) | {
            "preemptions_total": self._scheduler.preemptions,
            "cached_tokens_total": self._scheduler.cached_tokens,
            "steps_total": self._steps,
            "adapters": len(self._adapters),
        }

    def close(self) -> None:
        if self._recorded is not None:
            self._recorded.close()
        self._inbox.close()
        self._constraints.close()
        self._loader.close()
        self._watcher.join()
        self.runner.close()

    def _cached_layers(self) -> range:
        """Return the numbers of the layers that this engine's KV cache has room for."""
        return range(self.layers.start, self.layers.stop)

    @property
    def _weights(self) -> Weights:
        """The weights of all layers that this engine's steps will run."""
        return self._loader

    @property
    def _releases(self) -> bool:
        """Whether the host's copy of the weights is released."""
        return self._gpu is not None and self._settings.host_weights == "release"

    def _applier(self, *, rest: bool = False) -> Applier:
        """Return an applier for this engine's layers; with ``rest``, for the model's other layers."""
        if self.layers.is_first and self.layers.is_last:
            return self._model.applier(self._dtype)
        return PartApplier(
            self._model,
            lambda name: self.layers.needs(self._model, name),
            dtype=self._dtype,
            quantization=self._model.config.quantization,
            divide=self._model.divide,
            rest=rest,
            room_for_all=self._caches_all_layers,
        )

    # The methods below belong to the thread of ``run``, unless they say otherwise.

    def _watch(self) -> None:
        """Wait for the weights and the tokenizer, in a thread of its own."""
        try:
            self._loader.wait()
            self._tokenizer.wait(self.info.vocab_size)
        except MedusaError as error:
            self._load_error = error
        except Exception as error:  # noqa: BLE001 - wait_ready has to raise any error
            self._load_error = EngineError(f"the weights could not be applied: {type(error).__name__}: {error}")
            self._load_error.__cause__ = error
        self._inbox.post(lambda: None)

    def _check_loaded(self) -> None:
        """Raise the error of loading, if it has failed already. Any thread may call this."""
        if self._load_error is not None:
            raise self._load_error

    def _run_next_step(self) -> bool:
        """Run the next step, if there is anything to run. Returns whether there was."""
        spans = self._scheduler.schedule()
        if spans:
            self._step(spans)
        return bool(spans)

    def _use_idle_time(self) -> bool:
        """Do a little work that can wait, and return whether there was any."""
        return self.runner.use_idle_time()

    def _release_sequence(self, sequence: Sequence) -> None:
        """Free what the engine holds for a sequence that has ended."""
        self._scheduler.remove(sequence)
        if sequence.constraint is not None:
            sequence.constraint.close()

    def _begin(self, sequence: Sequence) -> None:
        if sequence.cancelled:
            if sequence.constraint is not None:  # it was opened after the sequence had ended
                sequence.constraint.close()
        elif not self._adapters.defer(sequence):
            self._scheduler.add(sequence)

    def _step(self, spans: list[Span]) -> None:
        start_ns = time.monotonic_ns()
        try:
            spans = self._adapters.group_by_adapter(spans)
            self._constraints.request_masks(spans)
            logits, sequences = self.runner.step(spans)
            if self._recorded is not None and self._recorded.unverified and not self._recorded.verify():
                self._scheduler.recompute()
                return
            self._adapters.end_misfits(spans)
            sampled = [] if logits is None else self._sample(logits, sequences)
        except MedusaError:
            raise
        except Exception as error:
            self._failed_steps += 1
            full = is_full(error)  # there is nothing to look for in a traceback
            failure = step_error(error)
            if self._failed_steps >= _MOST_FAILED_STEPS:
                if full:
                    raise failure from error
                raise
            log = logger.error if full else logger.exception
            log("a step failed; its %d requests end: %s", len(spans), failure)
            for span in spans:
                self._requests.end(span.sequence, "error", failure)
            return
        self._failed_steps = 0
        self._deliver(spans, sequences, sampled, start_ns, request_next_masks=True)

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """Sample a token for each row of ``logits`` that the row's grammar, if any, allows."""
        for ended in self._constraints.apply(logits, sequences):
            ended.sequence.cancelled = True
            self._requests.end(ended.sequence, "error" if ended.error else "stop", ended.error)
        return self.runner.sample(logits, sequences)

    def _deliver(
        self,
        spans: list[Span],
        sequences: list[Sequence],
        sampled: list[SampledToken],
        start_ns: int,
        *,
        request_next_masks: bool = False,
    ) -> None:
        """Deliver the tokens of a step that began at ``start_ns`` (of the monotonic clock).

        ``request_next_masks`` says that the next step continues the same sequences, so their masks can be prepared now.
        """
        for sequence, sampled_token in zip(sequences, sampled, strict=True):
            wanted = sequence.params.max_tokens != 0
            if sampled_token.token == NO_TOKEN and wanted and not sequence.cancelled:
                sequence.cancelled = True
                self._requests.end(sequence, "error", RequestError(_NO_TOKEN_LEFT))
        self._constraints.add_tokens(sequences, sampled, request_next=request_next_masks)
        if self._steps:  # the first one may have waited for layers
            self._requests.note_prefill(sum(stop - start for _, start, stop in spans if stop - start > 1), start_ns)
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
                self._requests.add_token(sequence, sampled_token)


def step_error(error: Exception) -> MedusaError:
    """Return our error in place of one that a step has raised, such as torch's when a GPU's memory is full."""
    if isinstance(error, MedusaError):
        return error
    if not is_full(error):
        return EngineError(f"the engine failed: {type(error).__name__}: {error}")
    return full_gpu(error, "a step beside the weights and the KV cache")
