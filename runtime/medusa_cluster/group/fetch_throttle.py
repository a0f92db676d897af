"""A limit on how fast a worker fetches the layers that it does not need yet (ParaServe §4.2, §6.1).

A worker's own layers come first. The other workers' layers are held back until the whole group has its own, because all
workers read from the same store. After that, they leave room on the link for hidden states while there are requests.
They leave most of it while prompts are computed, because then hidden states are large and clients wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from medusa_runtime.checkpoint.order import layers_first
from medusa_runtime.models.layer_range import LayerRange
from medusa_runtime.region.reader import Region

BUSY_SHARE = 0.85  # the share of the link for weights beside hidden states
PROMPT_SHARE = 0.4  # the same beside the hidden states of prompts
_BUSY_S = 10.0  # how long after a step the worker counts as busy
_PROMPT_S = 2.0  # how long after a prompt's step
_LEASE_S, _RENEW_S = 1.0, 0.25
_SHORTEST_HOLD_S = 1.0


class FetchThrottle:
    """The share of the link for the other workers' layers, which a thread gives the prefetcher until ``release``.

    ``loaded`` returns whether this worker has its own layers. Without ``full``, it never needs the other layers. Its
    user sets ``group_loaded`` when every worker has its layers. If that takes more than twice as long as this worker
    took, the throttle stops waiting for it, since the group may never form.

    ``layers`` are this worker's own, for an engine that does not ask the prefetcher for what it waits for. Usually they
    come first anyway. But the node may have begun to fetch the model before it had a part in the group. Then they would
    be held back, too.
    """

    def __init__(
        self, region: Region, loaded: Callable[[], bool], *, full: bool, layers: LayerRange | None = None
    ) -> None:
        self.group_loaded = False
        self._layers = layers
        self._full = full
        self._region, self._loaded = region, loaded
        self._released = threading.Event()
        self._began = time.monotonic()
        self._loaded_at: float | None = None
        self._used_at = self._prompts_at = -_BUSY_S
        threading.Thread(target=self._run, name="group-throttle", daemon=True).start()

    def note_step(self, *, prompts: bool = False) -> None:
        """Note that a step begins. With ``prompts``, it runs several tokens of one sequence."""
        self._used_at = time.monotonic()
        if prompts:
            self._prompts_at = self._used_at

    def release(self) -> None:
        """Hold nothing back from now on. Can be called twice."""
        self._released.set()

    def share(self, now: float) -> float:
        """Return the share of the link for the other workers' layers, from 0 to 1. ``now`` is monotonic seconds."""
        if not self._full or not self._loaded():
            return 0.0
        if self._loaded_at is None:
            self._loaded_at = now
        longest_s = max(self._loaded_at - self._began, _SHORTEST_HOLD_S)
        if not self.group_loaded and now - self._loaded_at < longest_s:
            return 0.0
        if now - self._prompts_at < _PROMPT_S:
            return PROMPT_SHARE
        return BUSY_SHARE if now - max(self._used_at, self._loaded_at) < _BUSY_S else 1.0

    def _run(self) -> None:
        own = self._own_tensors()
        while not self._released.is_set():
            if own and not self._loaded():
                self._region.hint(own)
            self._region.pace(self.share(time.monotonic()), _LEASE_S)
            self._released.wait(_RENEW_S)
        self._region.pace(1.0, _LEASE_S)

    def _own_tensors(self) -> list[str]:
        if self._layers is None:
            return []
        return layers_first(self._region.wait_index().order, self._layers.start, self._layers.stop)[0]


__all__ = ["BUSY_SHARE", "PROMPT_SHARE", "FetchThrottle"]
