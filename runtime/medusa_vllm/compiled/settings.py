"""Decides whether vLLM runs a compiled model, and where the compiled code comes from."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from medusa_runtime.config import Settings
from medusa_runtime.errors import StateError
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kinds import file_name
from medusa_runtime.timeline import Timeline

from medusa_vllm import COMPILE_CACHE

from ..scratch import scratch_folder
from .cache import ARCHIVE, cache_folders
from .compiler_folder import claim_compiler_folder
from .model import INDEX, CompiledModel, check_index, config_key

logger = logging.getLogger(__name__)

# In model_loader_extra_config. The key is that of the configuration as the engine has made it: loading may change it.
_RESTORED, _CAPTURED, _KEY, _ALWAYS = "medusa_compiled", "medusa_capture", "medusa_compile_key", "medusa_compile"


class CompiledStart:
    """The way one engine starts: compiled or eager (``wanted``), and with the bundle's compile cache if there is one.

    ``auto`` compiles only where a bundle makes the compiler unnecessary; ``always`` compiles where there is no bundle.
    ``extra`` passes that to the workers, in the load configuration.
    """

    def __init__(
        self,
        region: Region,
        settings: Settings,
        timeline: Timeline,
        capture: Path | None = None,
        code: bytes | None = None,
    ) -> None:
        """``capture`` is the folder into which workers write what they compile, ``code`` a cache to use instead."""
        self.extra: dict[str, str] = {} if capture is None else {_CAPTURED: str(capture)}
        self._always = settings.compile == "always"
        if self._always:
            claim_compiler_folder()
        self._timeline = timeline
        self._fd = -1
        self._blob = code
        if settings.compile != "never" and capture is None and code is None:
            with timeline.stage("compiled_restore"):  # waits for the blob, because the configuration depends on it
                self._blob = region.code(file_name(COMPILE_CACHE.name))

    @property
    def wanted(self) -> bool:
        return self._always or self._blob is not None

    def matches(self, config: Any) -> bool:
        """Return whether the code was compiled for this VllmConfig.

        After it has returned False, the configuration must be made again, for a start without the cache.
        """
        if _CAPTURED in self.extra:
            self.extra[_KEY] = config_key(config)
            config.load_config.model_loader_extra_config |= self.extra
        if self._blob is None:
            return True
        try:
            if (ranks := config.parallel_config.world_size) > 1:
                raise StateError(f"it was made for one rank, here are {ranks}")  # noqa: TRY301
            check_index(ARCHIVE.read(self._blob, INDEX), config)
        except StateError as error:
            logger.warning("%s is not used: %s", COMPILE_CACHE.name, error)
            self._timeline.mark("compiled", left_out=str(error)[:300])
            self._blob = None
            return False
        # A path, as for the region, because a rank may be a new interpreter.
        self._fd = os.memfd_create("medusa-compile-cache", os.MFD_CLOEXEC)
        with open(self._fd, "wb", closefd=False) as file:
            file.write(self._blob)
        self.extra |= {_RESTORED: f"/proc/{os.getpid()}/fd/{self._fd}"} | ({_ALWAYS: "1"} if self._always else {})
        config.load_config.model_loader_extra_config |= self.extra
        return True

    def close(self) -> None:
        """Remove the files that only loading workers need."""
        self._blob = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Stages(Protocol):
    """The part of a Timeline that a worker's compilation needs."""

    def stage(self, name: str) -> AbstractContextManager[dict[str, Any]]: ...


class WorkerCompilation:
    """A worker's part: attach the restored code to its model, or record what its warm-up compiles."""

    def __init__(self, load_config: Any, timeline: _Stages) -> None:
        extra = load_config.model_loader_extra_config
        self._restored: str | None = extra.get(_RESTORED)
        self._captured: str | None = extra.get(_CAPTURED)
        self._key: str = extra.get(_KEY, "")
        self._always = _ALWAYS in extra
        self._timeline = timeline
        self._recording = ExitStack()
        self._attached = False
        self.should_warm_up = True

    def on_model_loaded(self, model: Any, config: Any) -> None:
        if self._captured is not None:
            self._recording.enter_context(CompiledModel(Path(self._captured)).record(model, self._key))
        elif self._restored is not None:
            self.should_warm_up = False  # there is nothing to compile
            with self._timeline.stage("compiled_attach") as detail:
                try:
                    detail["functions"] = _attach(Path(self._restored), model, config)
                    self._attached = True
                except (StateError, OSError) as error:
                    logger.warning("%s is not used: %s", COMPILE_CACHE.name, error)
                    detail["left_out"] = str(error)[:300]
                    self.should_warm_up = self._always
                    if not self._always:
                        _run_eagerly(model)

    def on_warmed_up(self) -> None:
        self._recording.close()

    @contextmanager
    def without_compiler(self) -> Iterator[None]:
        """Where all code is attached, keep vLLM from preparing Inductor, which would compile, in this context.

        That takes most of a second.
        """
        module, name = sys.modules.get("vllm.compilation.compiler_interface"), "trigger_inductor_lazy_init"
        if not self._attached or not hasattr(module, name):
            yield
            return
        from unittest.mock import patch

        with patch.object(module, name, lambda *_: None):
            yield


def _attach(blob: Path, model: Any, config: Any) -> int:
    """Attach the code from a temporary folder: it is mapped or read at once.

    Triton's cache stays where it is, if it has been named: Triton's own driver may be there.
    """
    from unittest.mock import patch

    with scratch_folder("medusa-compiled") as scratch:
        folder = ARCHIVE.unpack(blob.read_bytes(), scratch)
        caches = cache_folders(scratch)
        caches["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR", caches["TRITON_CACHE_DIR"])
        with patch.dict(os.environ, caches):
            return CompiledModel(folder).attach(model, config)


def _run_eagerly(model: Any) -> None:
    """Run a model eagerly if no code could be attached: compiling now would take longer than a request waits.

    This includes operators that vLLM compiles by themselves.
    """
    import torch

    torch.compiler.set_stance("force_eager")
    for module in model.modules():
        if hasattr(module, "do_not_compile"):
            module.do_not_compile = True


__all__ = ["CompiledStart", "WorkerCompilation"]
