"""vLLM's engine core behind our protocol, in this process: no server, no second import, no socket in between.

    add ─▶ inbox ─▶ vLLM's scheduler, worker, sampler ─token▶ completion ─delta▶ sink

Text is made and stop strings are found here, as in the torch engine. vLLM sees only token ids.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from medusa_runtime.config import Settings
from medusa_runtime.container_limits import cpu_count
from medusa_runtime.engine.base import EXPOSITION, EngineInfo, GenerateRequest
from medusa_runtime.engine.serving.cut import Cut
from medusa_runtime.engine.serving.inbox import Inbox
from medusa_runtime.engine.serving.model_name import accepted_names, served_name
from medusa_runtime.engine.serving.requests import Requests, Sink
from medusa_runtime.engine.serving.sequence import SampledToken, Sequence
from medusa_runtime.engine.serving.tokenizer import Tokenizer
from medusa_runtime.errors import ConfigError, EngineError, MedusaError, ModelError, RequestError
from medusa_runtime.models.backend import backend
from medusa_runtime.models.fields import read_object
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kv_plan import KvPlan
from medusa_runtime.timeline import Timeline

from .compiled.compilations import compilations
from .compiled.settings import CompiledStart
from .configuration import configure
from .core_request import CLIENT, core_request
from .eos import eos_token_ids
from .flags import flag_words, light_routes_suffice
from .imports import server_is_imported
from .prefills import watch_prefills
from .serving.front_end import FrontEnd, ServedModel
from .serving.statistics import Progress, Statistics
from .shared_memory import remove_names_of_ranks
from .structured import StructuredOutputManagers, TokenizerFolder
from .weights.completeness import check_scales

logger = logging.getLogger(__name__)

_set_num_threads = torch.set_num_threads  # kept, because vLLM's worker replaces it with a function that does nothing
_LITTLE_MEMORY = re.compile(r"\(([\d.]+)/([\d.]+) GiB\) on kv cache allocation is less than .* kv \(([\d.]+)")
_IDLE_S = 0.2  # how often an idle engine looks at its stop event, which a signal handler may set


class VllmEngine:
    """vLLM as an engine.

    Construction waits for the checkpoint's index and configures vLLM; ``run`` loads and serves.
    """

    slow_calls = ("stats",)  # vLLM's metrics take milliseconds to write
    mounts_when_idle = True  # vLLM's own HTTP server; False offline, where nobody sends it a request
    mounts_at_start = True  # if flags want it; False where its core comes later

    def __init__(
        self,
        region: Region,
        settings: Settings,
        timeline: Timeline,
        *,
        capture: Path | None = None,
        code: bytes | None = None,
        on_load_error: Callable[[MedusaError], None] = lambda error: None,
    ) -> None:
        """Offline, ``capture`` is the folder into which compiled code is written, ``code`` a compile cache to use.

        ``on_load_error`` is called if the model cannot be loaded, before any request learns of it.
        """
        _set_num_threads(settings.threads or cpu_count())
        region.wait_index()
        backend(region.file, settings)
        check_scales(read_object(region.file, "config.json") or {}, region.wait_index())
        self._settings, self._region, self._timeline = settings, region, timeline
        self._tokenizer = Tokenizer(region.file("tokenizer.json"), timeline)
        self._compiled = CompiledStart(region, settings, timeline, capture, code)
        self._files = TokenizerFolder(region)
        try:
            self.config, budget, self._arguments = configure(self._files, region, settings, timeline, self._compiled)
            if not self._compiled.matches(self.config):
                self.config, budget, self._arguments = configure(
                    self._files, region, settings, timeline, self._compiled
                )
            self._on_configured(budget)
        except BaseException:
            self._files.close()
            raise
        model = self.config.model_config
        self._vocab_size = model.get_vocab_size()
        self._is_pooling = model.runner_type == "pooling"  # it embeds, classifies or scores, only through vLLM's routes
        self.info = EngineInfo(
            "vllm",
            str(model.architecture),
            self._vocab_size,
            model.max_model_len,
            eos_token_ids(region, model.hf_config),
            budget.tokens,
        )
        self._core: Any = None
        self._inbox = Inbox()
        self._structured = StructuredOutputManagers(
            region, self._inbox, self._files, vocab_size=self._vocab_size, eos_token_ids=self.info.eos_token_ids
        )
        self._front_end = FrontEnd(timeline)
        self._mounting = False
        self._requests = Requests(settings, self._tokenizer, self.info, timeline, self._release)
        named = self._arguments.get("served_model_name") or served_name(settings, region.file)
        self._statistics = None if self._arguments["disable_log_stats"] else Statistics(self.config, named)
        self._loaded = threading.Event()
        self._load_error: MedusaError | None = None
        self._on_load_error = on_load_error
        self._steps = 0

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        if self._is_pooling:
            raise RequestError(
                f"{self.info.architecture} continues no text in vLLM; expected a request to a route for what it does: "
                "/v1/embeddings, /pooling, /classify, /score or /rerank"
            )
        sequence = self._requests.open(request, sink)
        if self._statistics is not None:
            self._statistics.open(sequence)
        form = request.params.structured_outputs
        if form is not None:
            with self._requests.withdrawing(sequence):
                self._loaded.wait()  # in a thread of this request's own
                if self._load_error is not None:
                    raise self._load_error
                self._structured.prepare(self._core, form, lambda: not sequence.cancelled)
        self._inbox.post(lambda: self._begin(sequence))

    def cancel(self, request_id: str) -> None:
        sequence = self._requests.get(request_id)
        if sequence is not None:
            sequence.cancelled = True  # set at once, so that the running step gives it no token
            self._inbox.post(lambda: self._requests.end(sequence, "cancelled"))

    def run(self, stop: threading.Event) -> None:
        with contextlib.closing(self._inbox), self._requests.serving(_missing_kernel):
            self._load()
            while not stop.is_set():
                self._inbox.run_pending()
                if self._core.has_work():
                    self._step()
                else:
                    self._core.notify_idle()
                    if self._requests.generated_tokens or self._is_pooling or server_is_imported():
                        self._mount_when_idle()
                    self._inbox.wait(_IDLE_S)

    @property
    def loaded(self) -> bool:
        """Whether the model was loaded."""
        return self._loaded.is_set() and self._load_error is None

    def wait_ready(self) -> None:
        """Wait for the model and, if flags let vLLM's server answer all requests, for that server."""
        self._wait_loaded()
        if self.mounts_at_start and self.mounts_when_idle and not light_routes_suffice(self._settings):
            try:
                self.open_http()
            except EngineError as error:
                raise ConfigError(f"{error}; expected flags of vllm serve with which it starts") from error

    def _wait_loaded(self) -> None:
        self._loaded.wait()
        if self._load_error is not None:
            raise self._load_error
        self._tokenizer.wait(self.info.vocab_size)

    def open_http(self) -> Callable[[socket.socket], None]:
        """Wait until vLLM's own HTTP server is there, and return a function that takes a connection."""
        self._wait_loaded()
        if not hasattr(self._core, "attach_front_end"):
            from .serving.core import missing_part

            raise RequestError(f"this version of vLLM has no {missing_part()}, so only medusa's own routes answer")
        names = accepted_names(self._settings, self._region.file)
        config = self.config.model_config
        served = ServedModel(
            self._core, self._files.path, self._arguments["distributed_executor_backend"], config.max_model_len, names,
            flag_words(self._settings), self._structured.limit_grammars, self._statistics,
        )  # fmt: skip
        return self._front_end.open(served)

    def warm_up_server(self) -> None:
        """Mount vLLM's own HTTP server, send it requests and end it, so that what is done once per process is done."""
        if server_is_imported() and hasattr(self._core, "attach_front_end"):
            from .serving.warmup import send_warmup_requests

            send_warmup_requests(self.open_http(), served_name(self._settings, self._region.file))
            self._front_end.close()

    def tokenize(self, text: str, add_special_tokens: bool = True, **cut: Any) -> list[int]:
        return self._tokenizer.tokenize(text, add_special_tokens, self.info, Cut(**cut))

    def detokenize(self, token_ids: list[int]) -> str:
        return self._tokenizer.detokenize(token_ids, self.info)

    def stats(self) -> dict[str, Any]:
        scheduler = self._core.scheduler if self._core is not None else None
        running = len(scheduler.running) if scheduler is not None else 0
        used = scheduler.kv_cache_manager.usage if scheduler is not None else 0.0
        return self._requests.stats(running, round(used * self.info.kv_tokens)) | {
            "steps_total": self._steps,
            "compilations_total": sum(compilations()),
            EXPOSITION: self._vllm_metrics(),
        }

    def close(self) -> None:
        self._inbox.close()
        self._structured.close()
        self._files.close()
        core, self._core = self._core, None
        if core is None:
            return
        core.model_executor.shutdown()
        core.scheduler.shutdown()

    def _vllm_metrics(self) -> str:
        """Return vLLM's metrics; none before the first token, unless no request waits for it."""
        early = not self.loaded or (len(self._requests) > 0 and not self._requests.generated_tokens)
        if self._statistics is None or early or not getattr(self._core, "log_stats", False):  # or closed already
            return ""
        return self._statistics.page()

    def _on_configured(self, plan: KvPlan) -> None:
        """Do nothing: a hook for subclasses, called once the configuration is made."""

    # The methods from here on run in the thread of ``run``.

    def _open_core(self) -> Any:
        """Make vLLM's core, which loads the model."""
        from vllm.v1.executor import Executor

        from .serving.core import core_class
        from .serving.replacement import cached_entry_points

        with self._timeline.stage("core"), cached_entry_points():
            core = core_class()(self.config, Executor.get_class(self.config), self._inbox, self._handle)
        remove_names_of_ranks(core.model_executor)
        self._watch(core)
        return core

    def _watch(self, core: Any) -> None:
        from .serving.core import check_parts

        check_parts(core)
        core.on_add = self._on_add
        watch_prefills(core.scheduler, self._requests.note_prefill)

    def _load(self) -> None:
        try:
            with _medusa_errors():
                self._core = self._open_core()
        except MedusaError as error:
            self._on_load_error(error)
            self._load_error = error
            raise
        finally:
            self._compiled.close()
            self._loaded.set()

    def _mount_when_idle(self) -> None:
        """Mount vLLM's server in a thread of its own, once.

        The engine must be idle, and either have sent its first token or have imported the server's modules already.
        """
        if self._mounting or not self.mounts_when_idle or not hasattr(self._core, "attach_front_end"):
            return
        self._mounting = True

        def mount() -> None:
            with contextlib.suppress(MedusaError):  # it is logged, and raised again for each request that needs it
                self.open_http()

        threading.Thread(target=mount, name="vllm-mount", daemon=True).start()

    def _begin(self, sequence: Sequence) -> None:
        if sequence.cancelled:
            return
        try:
            request, _ = self._core.preprocess_add_request(core_request(sequence, vocab_size=self._vocab_size))
            self._core.add_request(request)
        except Exception as error:  # noqa: BLE001 - it ends this request alone; vLLM's errors differ between versions
            self._requests.end(sequence, "error", RequestError(f"vLLM refuses the request: {error}"))

    def _step(self) -> None:
        start_ns = time.monotonic_ns()
        try:
            executed = self._core.run_step()
        except Exception as error:
            if look := getattr(self._core.model_executor, "on_failed_step", None):
                look(error)
            raise
        if executed and self._steps == 0:
            self._first_forward(start_ns)
        self._steps += executed

    def _first_forward(self, start_ns: int) -> None:
        self._timeline.record("first_forward", start_ns, time.monotonic_ns())

    def _handle(self, outputs: Any) -> None:
        progress = []
        for output in outputs.outputs:
            sequence = self._requests.get(output.request_id)
            if sequence is not None and not sequence.cancelled:
                if sequence.cached_tokens is None:
                    prefill = getattr(output, "prefill_stats", None)
                    sequence.cached_tokens = getattr(prefill, "num_cached_tokens", 0)
                progress.append(Progress(sequence, output, self._deliver(sequence, output)))
        if self._statistics is not None and self._core.log_stats:
            self._statistics.record(outputs, progress)

    def _on_add(self, request: Any) -> None:
        """Make the core's masks in the thread of the front end's first request that needs them."""
        params = request.sampling_params
        if request.client_index != CLIENT and params is not None and params.structured_outputs is not None:
            self._structured.install(self._core)

    def _deliver(self, sequence: Sequence, output: Any) -> str | None:
        """Deliver an output's tokens. Returns the reason if the sequence ends with them."""
        for position, token in enumerate(output.new_token_ids):
            delta = self._requests.add_token(sequence, _sampled(output, position, token))
            if delta.finish_reason is not None:
                return delta.finish_reason
        if output.finish_reason is None:
            return None
        reason = {"error": "error", "abort": "cancelled"}.get(str(output.finish_reason), "stop")
        failed = EngineError("vLLM ended the request with an error; try again") if reason == "error" else None
        self._requests.end(sequence, reason, failed)
        return reason

    def _release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks. vLLM ignores ids of requests that it has ended itself."""
        if self._core is not None:
            self._core.abort_requests([sequence.id])


def _sampled(output: Any, position: int, token: int) -> SampledToken:
    """Return a sampled token. vLLM's arrays have it first, then the most likely tokens."""
    found = output.new_logprobs
    if found is None:
        return SampledToken(token)
    ids, values = found.logprob_token_ids[position].tolist(), found.logprobs[position].tolist()
    return SampledToken(token, values[0], tuple(zip(ids[1:], values[1:], strict=True)))


# A kernel that was not built for this processor: without a name, or with one and no arguments.
_MISSING_KERNEL = re.compile(
    r"'_OpNamespace' '\w+' object has no attribute '(\w+)'|_C::(\w+)\(\) expected at most 0 argument"
)


def _missing_kernel(error: Exception) -> ModelError | None:
    """Return the error for a quantization that loads on any CPU but has no kernel at the first forward, else None."""
    missing = _MISSING_KERNEL.search(str(error))
    if missing is None:
        return None
    return ModelError(
        f"vLLM has no {missing[1] or missing[2]} for this machine's processor; expected one that has it (on x86 often "
        f"AVX-512), or a checkpoint with another quantization, or none"
    )


@contextlib.contextmanager
def _medusa_errors() -> Iterator[None]:
    """Raise one of our errors, with vLLM's as its cause, in place of any other."""
    try:
        yield
    except MedusaError:
        raise
    except Exception as error:
        raise _reason(error) from error


def _reason(error: Exception) -> MedusaError:
    """Return one of our errors, with the reason why a model could not be loaded."""
    if (missing := _missing_kernel(error)) is not None:
        return missing
    if (short := _LITTLE_MEMORY.search(str(error))) is not None:
        return ConfigError(
            f"expected {short[3]} GiB of free memory for the KV cache, vLLM found {short[1]} of {short[2]} GiB; give "
            "the container more memory, or lower --kv-cache-mb"
        )
    said = " ".join(str(error).split())
    if isinstance(error, ValueError | NotImplementedError | AssertionError | KeyError):
        return ModelError(f"vLLM cannot load this model: {said or type(error).__name__}")
    return EngineError(f"vLLM could not load the model: {type(error).__name__}: {said}")
