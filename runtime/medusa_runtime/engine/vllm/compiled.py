"""Whether vLLM runs a compiled model here, and where what was compiled comes from."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...config import Settings
from ...errors import StateError
from ...state.compile_cache import restore
from ...state.compiled_model import CompiledModel
from ...state.kinds import COMPILE_CACHE, file_name
from ...timeline import Timeline
from ...weights.region import Region

logger = logging.getLogger(__name__)

_RESTORED, _CAPTURED, _ALWAYS = "medusa_compiled", "medusa_capture", "medusa_compile"  # in model_loader_extra_config


class CompiledStart:
    """Of one engine: ``wanted`` compiled or eager, with the bundle's compile cache in a private folder if there is one.

    ``auto`` compiles only where a bundle saves the compiler; ``always`` compiles where there is none. The folder is
    removed on exit, when the worker has loaded what is in it.
    """

    def __init__(self, region: Region, settings: Settings, timeline: Timeline, capture: Path | None = None) -> None:
        self.extra: dict[str, str] = {} if capture is None else {_CAPTURED: str(capture)}
        self._always = settings.compile == "always"
        self._timeline = timeline
        self._scratch: Path | None = None
        if settings.compile != "never" and capture is None:
            self._restore(region)

    @property
    def wanted(self) -> bool:
        return self._always or _RESTORED in self.extra

    def suits(self, config: Any) -> bool:
        """Whether a VllmConfig is the one that was compiled for; False, once, when it has to be made anew without."""
        if _RESTORED not in self.extra:
            return True
        try:
            CompiledModel(Path(self.extra[_RESTORED])).check(config)
        except StateError as error:
            self._leave_out(error)
            del self.extra[_RESTORED]
            return False
        if self._always:
            self.extra[_ALWAYS] = "1"
        return True

    def _restore(self, region: Region) -> None:
        start_ns = time.monotonic_ns()
        try:
            blob = region.file(file_name(COMPILE_CACHE.name))  # waits for it: the configuration depends on it
            if blob is None:
                return
            self._scratch = Path(tempfile.mkdtemp(prefix="medusa-compiled-"))
            restored = restore(blob, self._scratch)
        except (StateError, OSError) as error:
            self._leave_out(error)
            return
        self.extra[_RESTORED] = str(restored.folder)
        os.environ.update(restored.env)
        self._timeline.record("compiled_restore", start_ns, time.monotonic_ns(), bytes=len(blob))

    def _leave_out(self, error: Exception) -> None:
        logger.warning("%s is not used: %s", COMPILE_CACHE.name, error)
        self._timeline.mark("compiled", left_out=str(error)[:300])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


class WorkerCompilation:
    """A worker's part: attach what was restored to its model, or record what its warm-up compiles."""

    def __init__(self, load_config: Any, timeline: Timeline) -> None:
        extra = load_config.model_loader_extra_config
        self._restored: str | None = extra.get(_RESTORED)
        self._captured: str | None = extra.get(_CAPTURED)
        self._always = _ALWAYS in extra
        self._timeline = timeline
        self._recording = ExitStack()
        self.warms_up = True

    def model_loaded(self, model: Any, config: Any) -> None:
        if self._captured is not None:
            self._recording.enter_context(CompiledModel(Path(self._captured)).record(model, config))
        elif self._restored is not None:
            self.warms_up = False  # there is nothing to compile
            with self._timeline.stage("compiled_attach") as detail:
                try:
                    detail["functions"] = CompiledModel(Path(self._restored)).attach(model, config)
                except StateError as error:
                    logger.warning("%s is not used: %s", COMPILE_CACHE.name, error)
                    detail["left_out"] = str(error)[:300]
                    self.warms_up = self._always
                    if not self._always:
                        _run_eagerly(model)

    def warmed_up(self) -> None:
        self._recording.close()


def _run_eagerly(model: Any) -> None:
    """Compiling now would take longer than any request waits. vLLM also compiles some operators for themselves."""
    import torch

    torch.compiler.set_stance("force_eager")
    for module in model.modules():
        if hasattr(module, "do_not_compile"):
            module.do_not_compile = True


__all__ = ["CompiledStart", "WorkerCompilation"]
