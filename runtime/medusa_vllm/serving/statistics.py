"""vLLM's own metrics (``vllm:…``), for the requests that do not pass through vLLM's front end as well.

Names, labels and values are made by vLLM's code. Its front end records its own requests. Here, the same is recorded for
ours, by the same logger, which exists from the first token on.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Iterator
from copy import copy
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from medusa_runtime.engine.serving.sequence import Sequence

logger = logging.getLogger(__name__)

_PREFIX = "vllm:"
_KEPT_STEPS = 100  # after so many, samples of adapters that ran or waited together are dropped
_COUNTED = ("stop", "length", "error")  # requests that are cancelled are not counted, as in vLLM


class Progress(NamedTuple):
    """The result of a step for a sequence: vLLM's output, and why the sequence has ended with it, if it has."""

    sequence: Sequence
    output: Any
    finish_reason: str | None


class Statistics:
    """The metrics of one engine. The engine's thread records; any thread may ask for the page.

    ``config`` is the VllmConfig of the core, and ``name`` the model's name in labels.
    """

    def __init__(self, config: Any, name: str | list[str]) -> None:
        self._config = config
        self._name = name
        self._lock = threading.Lock()
        self._logger: Any = None
        self._requests: WeakKeyDictionary[Sequence, Any] = WeakKeyDictionary()  # vLLM's state of each
        self._failed = False

    def open(self, sequence: Sequence) -> None:
        """Count a request from now on."""
        from vllm.v1.metrics.stats import RequestStateStats

        self._requests[sequence] = RequestStateStats(arrival_time=time.time())

    def record(self, outputs: Any, progress: list[Progress]) -> None:
        """Record a step's outputs (EngineCoreOutputs). If this version of vLLM does so differently, warn once."""
        if self._failed:
            return
        try:
            self.logger().record(outputs.scheduler_stats, self._iteration(outputs.timestamp, progress))
        except Exception as error:  # noqa: BLE001 - no answer depends on it
            self._failed = True
            logger.warning("vLLM's metrics are not complete from now on: %s: %s", type(error).__name__, error)

    def logger(self) -> Any:
        """Return vLLM's logger of metrics. There is one in a process: a new one replaces that of another engine."""
        with self._lock:
            if self._logger is None:
                made = _logger_class()(_named(self._config, self._name), [0])
                made.log_engine_initialized()
                self._logger = made
            return self._logger

    def logger_factory(self) -> type:
        """Return a class for ``AsyncLLM``'s argument ``stat_loggers`` whose instance is this logger."""
        made = self.logger()

        class Shared(type(made)):  # type: ignore[misc]
            def __new__(cls, *_: Any, **__: Any) -> Any:
                return made

        return Shared

    def page(self) -> str:
        """Return the lines of vLLM's metrics, in Prometheus' text format."""
        from prometheus_client import generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        self.logger()
        return str(generate_latest(_OfVllm(get_prometheus_registry())), "utf-8")

    def _iteration(self, timestamp: float, progress: list[Progress]) -> Any:
        """Return vLLM's statistics of a step, or None if it has given no sequence anything."""
        from vllm.v1.engine import FinishReason
        from vllm.v1.metrics.stats import IterationStats, LoRARequestStates

        if not progress:
            return None
        found, adapters = IterationStats(), LoRARequestStates()
        for sequence, output, finish_reason in progress:
            state = self._requests.get(sequence)
            if state is None:
                continue
            _call(
                found.update_from_output,
                output=output,
                engine_core_timestamp=timestamp,
                is_prefilling=not state.num_generation_tokens,
                prompt_len=sequence.prompt_length,
                req_stats=state,
                lora_states=adapters,
                lora_name=None,
            )
            if finish_reason in _COUNTED:
                _call(
                    found.update_from_finished_request,
                    finish_reason=FinishReason[finish_reason.upper()],
                    request_id=sequence.id,
                    num_prompt_tokens=sequence.prompt_length,
                    max_tokens_param=sequence.limit - sequence.prompt_length,
                    req_stats=state,
                    num_cached_tokens=sequence.cached_tokens or 0,
                )
                found.max_num_generation_tokens_iter.append(state.num_generation_tokens)
                found.n_params_iter.append(1)
        return found


def _logger_class() -> type:
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Logger(PrometheusStatLogger):  # type: ignore[misc]
        described = False
        steps = 0

        def log_engine_initialized(self) -> None:
            """Describe the KV cache, once: vLLM's front end asks for it again."""
            if not self.described:
                self.described = True
                super().log_engine_initialized()

        def record(self, *arguments: Any, **options: Any) -> None:
            """Record a step. vLLM would keep a sample of each list of adapters that ever ran together, for ever."""
            self.steps += 1
            lists = getattr(self, "gauge_lora_info", None)
            if lists is not None and not self.steps % _KEPT_STEPS:
                lists.clear()
            super().record(*arguments, **options)

    return Logger


def _named(config: Any, name: str | list[str]) -> Any:
    """Return the configuration with the model's name, which the core does not know."""
    from vllm.config.model import get_served_model_name

    config = copy(config)
    config.model_config = copy(config.model_config)
    config.model_config.served_model_name = get_served_model_name(config.model_config.model, name)
    return config


@cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _call(method: Any, **known: Any) -> None:
    """Call a method of vLLM's with those arguments that it has in this version."""
    names = _parameters(method.__func__)
    method(**{name: value for name, value in known.items() if name in names})


class _OfVllm:
    """Those metrics of a registry that are vLLM's, as a registry of its own."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Any]:
        return (metric for metric in self._registry.collect() if metric.name.startswith(_PREFIX))


__all__ = ["Progress", "Statistics"]
