"""How fast the layers are fetched that a worker does not need yet (ParaServe §4.2, §6.1).

Its own layers come first. Those of the others are held back until the whole group has its own, as all of them read from
the same store, and then leave room on the link for hidden states while there are requests: most of it while prompts
are computed, whose hidden states are large and whose clients wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from medusa_runtime.region.reader import Region

BUSY_SHARE = 0.85  # of the link, beside hidden states
PROMPT_SHARE = 0.4  # beside those of prompts
_BUSY_S = 10.0  # after a step: the next one may wait for hidden states for so long
_PROMPT_S = 2.0
_LEASE_S, _RENEW_S = 1.0, 0.25
_SHORTEST_HOLD_S = 1.0


class Pace:
    """Tells the prefetcher, until the worker is ``alone``. ``used`` is called as a step begins; ``loaded`` is the
    worker's.

    ``group_loaded`` is set when every worker has its layers. A group that takes more than twice as long as this worker
    is not waited for: it may never come. Without ``full`` this worker never needs the other layers.
    """

    def __init__(self, region: Region, loaded: Callable[[], bool], *, full: bool) -> None:
        self.group_loaded = False
        self._full = full
        self._region, self._loaded = region, loaded
        self._alone = threading.Event()
        self._began = time.monotonic()
        self._loaded_at: float | None = None
        self._used_at = self._prompts_at = -_BUSY_S
        threading.Thread(target=self._run, name="group-pace", daemon=True).start()

    def used(self, *, prompts: bool = False) -> None:
        """Note that a step begins. With ``prompts`` it runs several tokens of one sequence."""
        self._used_at = time.monotonic()
        if prompts:
            self._prompts_at = self._used_at

    def alone(self) -> None:
        """From now on nothing is held back. May be called twice."""
        self._alone.set()

    def share(self, now: float) -> float:
        """Of the link, for the layers of the other workers."""
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
        while not self._alone.is_set():
            self._region.pace(self.share(time.monotonic()), _LEASE_S)
            self._alone.wait(_RENEW_S)
        self._region.pace(1.0, _LEASE_S)


__all__ = ["BUSY_SHARE", "PROMPT_SHARE", "Pace"]
