"""The engine that the leader and the other workers build on. It loads its own layers first, and then the others."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.engine.torch.engine import TorchEngine
from medusa_runtime.errors import ConfigError, EngineError, MedusaError
from medusa_runtime.load.loader import Loader
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .fetch_throttle import FetchThrottle
from .identity import identity_of
from .plan import GroupPlan

if TYPE_CHECKING:
    from medusa_runtime.engine.gpu.runner import Weights

logger = logging.getLogger(__name__)


class WorkerEngine(TorchEngine):
    """An engine that holds a range of a model's layers. If the plan says ``full``, it later holds all of them.

    The engine's thread calls ``on_full`` once all are loaded.
    """

    def __init__(
        self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan, gpu: Gpu | None = None
    ) -> None:
        if settings.layers is None:
            raise ConfigError("--engine group needs --layers (MEDUSA_LAYERS): the layers that this worker holds first")
        self.plan = plan
        self.link = plan.emulated_link()
        self._rest: Loader | None = None
        self._rest_error: MedusaError | None = None
        self._rest_lock = threading.Lock()
        self._closing = threading.Event()
        self.full = threading.Event()
        super().__init__(region, settings, timeline, gpu)
        self._throttle = FetchThrottle(region, lambda: self.loaded, full=plan.full)
        if plan.full:
            threading.Thread(target=self._load_rest, name="group-rest", daemon=True).start()

    @property
    def loaded(self) -> bool:
        """Whether this worker's own layers are loaded."""
        return self._loader.applied

    def identity(self) -> dict[str, Any]:
        """Return what a worker's greeting says, and the leader checks before it takes the worker into the group."""
        return {
            **identity_of(self._region, self._model.config, self._dtype, size=self.plan.size, gpu=self._gpu),
            "layers": [self.layers.start, self.layers.stop],
            "blocks": self._cache.blocks.blocks,
        }

    @property
    def _needs_rest(self) -> bool:
        """Whether this engine needs the layers that are not its own."""
        raise NotImplementedError

    def on_full(self) -> None:
        """Act on all layers being loaded. Called in the engine's thread."""

    def load_rest_now(self, *, in_background: bool = False) -> None:
        """Begin to load the layers that are not this worker's own, if that has not begun.

        ``in_background``: they are not needed yet, and must not hold up this worker's steps.
        """
        with self._rest_lock:
            if self._rest is None and not self._closing.is_set():
                self._rest = Loader(
                    self._region,
                    self._applier(rest=True),
                    timeline=self._timeline,
                    link=None if self._gpu is None else self._gpu.open_link(in_background=in_background),
                    release=self._releases,
                    beside=self._loader,
                )

    def close(self) -> None:
        self._closing.set()
        self._throttle.release()
        super().close()
        with self._rest_lock:
            if self._rest is not None:
                self._rest.close()

    def _cached_layers(self) -> range:
        # A worker that will have all layers reserves room for their keys and values at once. On a CPU the pool takes
        # memory only where it is written.
        return range(self.layers.total) if self.plan.full else super()._cached_layers()

    @property
    def _weights(self) -> Weights:
        return _AllWeights(self)

    def _check_loaded(self) -> None:
        if self._rest_error is not None and self._needs_rest:
            raise self._rest_error
        super()._check_loaded()

    def _load_rest(self) -> None:
        """Load the other layers after this worker's own. Runs in a thread of its own."""
        try:
            self._loader.wait()
            self.load_rest_now(in_background=True)
            rest = self._rest
            if rest is None:
                return
            rest.wait()
        except MedusaError as error:
            self._rest_error = error
        except Exception as error:  # noqa: BLE001 - the engine must raise it, whatever it is
            if not self._closing.is_set():
                self._rest_error = EngineError(f"the other layers could not be loaded: {error}")
        else:
            self._timeline.mark("full")
            self._throttle.release()
            self.full.set()
            self._inbox.post(self.on_full)


class _AllWeights:
    """A worker's own layers together with the others, for the CUDA graphs of an instance."""

    def __init__(self, worker: WorkerEngine) -> None:
        self._worker = worker

    @property
    def placed(self) -> bool:
        rest = self._worker._rest
        return rest is not None and rest.placed and self._worker._loader.placed

    @property
    def applied(self) -> bool:
        return self._worker.full.is_set()


__all__ = ["WorkerEngine"]
