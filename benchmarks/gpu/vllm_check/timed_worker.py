"""vLLM's own worker on a GPU, with a clock beside its stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from vllm.v1.worker.gpu_worker import Worker


class TimedWorker(Worker):  # type: ignore[misc]
    """Measures what our worker puts on the timeline, under the same names. One worker a process."""

    stages: ClassVar[dict[str, float]] = {}

    def init_device(self) -> None:
        with self._timed("device"):
            super().init_device()

    def load_model(self, **options: Any) -> None:
        with self._timed("load"):
            super().load_model(**options)

    def determine_available_memory(self) -> int:
        with self._timed("kv_plan"):
            return int(super().determine_available_memory())

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with self._timed("kv_cache"):
            super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        capture = self.model_runner.capture_model

        def timed_capture(*arguments: Any, **options: Any) -> Any:
            with self._timed("capture"):
                return capture(*arguments, **options)

        self.model_runner.capture_model = timed_capture
        with self._timed("warm_up"):
            return super().compile_or_warm_up_model()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.monotonic() - began
