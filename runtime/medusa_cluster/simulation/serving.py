"""An instance that serves: prefill first come, first served, and continuous batching of the decodes.

Steps of a batch are not events of their own. All its sequences gain tokens at the same rate, so the next completion is
computed, and computed anew when the batch changes. A prompt waits for the end of the step that runs when it comes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from .network import call_after
from .profiles import Speed

_ALMOST = 1e-6  # of a token
# To a gateway, so many prompt tokens (8 KiB of a request's body) are as much work as a sequence, up to four sequences.
_PROMPT_TOKENS, _MOST_FOR_PROMPT = 2048, 4.0


def relieved_s(seconds: float, loaded: float, loaded_per_s: float) -> float:
    """Return how long a prefill of so many seconds takes beside a new instance that runs the layers it has.

    With a part f of the layers (``loaded`` now), the new instance takes f of the work, and at most half of it; the two
    are then 1 / (1 - f) times as fast as one (BlitzScale §5.2, without the rounding to layers).
    """
    if loaded >= 0.5 or loaded_per_s <= 0:
        return seconds * (1 - min(loaded, 0.5))
    until_half = math.log((1 - loaded) / 0.5) / loaded_per_s  # of work
    if seconds <= until_half:
        return (1 - loaded) * (1 - math.exp(-loaded_per_s * seconds)) / loaded_per_s
    return (0.5 - loaded) / loaded_per_s + (seconds - until_half) / 2


class ServedRequest:
    """A request under way. Times are on the simulated clock, or -1 for not yet.

    ``number`` is how many requests came before it. ``taken_s`` is when an instance took it, and ``begun_s`` when its
    prefill began.
    """

    __slots__ = (
        *("at_s", "taken_s", "begun_s", "first_s", "done_s"),
        *("model", "number", "output_tokens", "prompt_tokens"),
    )

    def __init__(self, at_s: float, model: int, prompt_tokens: int, output_tokens: int, number: int = 0) -> None:
        self.at_s, self.model, self.number = at_s, model, number
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.taken_s = self.begun_s = self.first_s = self.done_s = -1.0

    @property
    def work(self) -> float:
        """The estimated work, in sequences, as gateways estimate it."""
        return 1 + min(self.prompt_tokens / _PROMPT_TOKENS, _MOST_FOR_PROMPT)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s if self.first_s >= 0 else float("inf")

    @property
    def tpot_s(self) -> float:
        if self.done_s < 0:
            return float("inf")
        return (self.done_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Server:
    """One instance, or a group of ``size`` workers that pass activations on and work on ``size`` batches at once.

    ``decoder`` takes a prefilled request if prefill and decode are separate, and samples its first token. If it returns
    False, the request keeps its place here, with its keys and values, until there is room for it (``leave``).
    ``relieved`` maps the seconds of a prefill to those that it takes while a new instance relieves this one. ``pull``
    takes the next prompts from a shared queue; without it, prompts wait here. ``slower`` draws how many times longer
    than usual a prefill takes. ``batch_tokens`` limits the prompts that are prefilled together.
    """

    def __init__(
        self,
        env: Any,
        key: str,
        speed: Speed,
        concurrency: int,
        ended: Callable[[Server, ServedRequest | None], None],
        *,
        size: int = 1,
        hop_s: float = 0.0,
        batch_tokens: int = 8192,
    ) -> None:
        self._env, self._ended = env, ended
        self.key, self.speed, self.concurrency = key, speed, concurrency
        self.size, self.hop_s, self._batch_tokens = size, hop_s, batch_tokens
        self.decoder: Callable[[ServedRequest], bool] | None = None
        self.relieved: Callable[[float], float] | None = None
        self.pull: Callable[[int], list[ServedRequest]] | None = None
        self.slower: Callable[[], float] | None = None
        self.first_token: Callable[[ServedRequest], None] | None = None  # called when one has come
        self.running = 0
        self.work = 0.0  # of these, in sequences
        self._waiting: deque[ServedRequest] = deque()
        self._batch: list[ServedRequest] = []
        self._active: list[tuple[float, int, ServedRequest]] = []  # (tokens at which it ends, order, request)
        self._order = 0
        self._tokens, self._at_s = 0.0, 0.0  # tokens that each sequence has gained, and when that was true
        self._turn = 0
        self._stepping = False  # prompts wait for the end of the decode step that runs

    @property
    def places(self) -> int:
        return self.concurrency * self.size

    @property
    def free(self) -> int:
        return self.places - self.running

    def admit(self, request: ServedRequest) -> None:
        self._take(request)
        self._waiting.append(request)
        if self._batch or self._stepping:
            return
        if not self._active:
            self._prefill()
            return
        self._settle()
        self._stepping = True
        rest = max(math.ceil(self._tokens - _ALMOST) - self._tokens, 0.0)
        call_after(self._env, rest * self._step_s(), self._on_step)

    def take(self) -> None:
        """Prefill prompts from the shared queue, unless something is being prefilled."""
        if not self._batch and not self._stepping and self._pulled():
            self._prefill()

    def _pulled(self) -> bool:
        """Fetch prompts from the shared queue if none waits here. Return whether any waits now."""
        if not self._waiting and self.pull is not None:
            found = self.pull(self._batch_tokens)
            for request in found:
                self._take(request)
            self._waiting.extend(found)
        return bool(self._waiting)

    def _on_step(self) -> None:
        if not self._batch:
            self._settle()
            self._finish_decoded()
        self._stepping = False
        if self._waiting and not self._batch:
            self._prefill()

    def leave(self, request: ServedRequest) -> None:
        """Note that a prefilled request has gone to another instance."""
        self._release(request)
        self._ended(self, None)

    def take_over(self, request: ServedRequest, left: float | None = None) -> None:
        """Decode a request that another instance has prefilled. ``left`` is how many tokens it lacks; None: all."""
        self._take(request)
        if request.first_s < 0:
            self._begin(request)
        self._settle()
        self._join(request, left)
        if not self._batch:
            self._decode()

    def give(self, count: int) -> list[tuple[ServedRequest, float]]:
        """Hand over up to ``count`` requests that are being decoded, each with the number of tokens that it lacks."""
        self._settle()
        self._active.sort(reverse=True)
        given = [(request, end - self._tokens) for end, _, request in self._active[:count]]
        self._active = sorted(self._active[count:])
        for request, _ in given:
            self._release(request)
        return given

    def become(self, size: int, hop_s: float, speed: Speed) -> None:
        """Go on as an instance of its own, or as a larger group."""
        self._settle()
        self.size, self.hop_s, self.speed = size, hop_s, speed
        if not self._batch:
            self._decode()

    def _take(self, request: ServedRequest) -> None:
        self.running += 1
        self.work += request.work

    def _release(self, request: ServedRequest) -> None:
        self.running -= 1
        self.work = self.work - request.work if self.running else 0.0

    def _step_s(self) -> float:
        return self.speed.decode(len(self._active) / self.size) + self.size * self.hop_s

    def _settle(self) -> None:
        now = self._env.now
        if self._active and not self._batch:
            self._tokens += (now - self._at_s) / self._step_s()
        self._at_s = now

    def _prefill(self) -> None:
        self._settle()
        tokens = 0
        while self._waiting and (not self._batch or tokens + self._waiting[0].prompt_tokens <= self._batch_tokens):
            request = self._waiting.popleft()
            tokens += request.prompt_tokens
            request.begun_s = self._env.now
            self._batch.append(request)
        seconds = self.speed.prefill(tokens) * (self.slower() if self.slower is not None else 1.0)
        if self.relieved is not None:
            seconds = self.relieved(seconds)
        seconds += self.size * self.hop_s if self.size > 1 else 0.0
        if self.size > 1 and self._waiting:
            seconds /= self.size  # the next prompts follow through the stages at once
        self._turn += 1
        call_after(self._env, seconds, self._on_prefilled)

    def _on_prefilled(self) -> None:
        batch, self._batch = self._batch, []
        self._at_s = self._env.now
        for request in batch:
            if request.output_tokens > 1 and self.decoder is not None:
                if self.decoder(request):
                    self.leave(request)
                continue
            self._begin(request)
            if request.output_tokens <= 1:
                self._finish(request)
            else:
                self._join(request)
        if self._batch:
            return
        if self._pulled():
            self._prefill()
        else:
            self._decode()

    def _begin(self, request: ServedRequest) -> None:
        request.first_s = self._env.now
        if self.first_token is not None:
            self.first_token(request)

    def _join(self, request: ServedRequest, left: float | None = None) -> None:
        self._order += 1
        left = request.output_tokens - 1 if left is None else left
        heapq.heappush(self._active, (self._tokens + left, self._order, request))

    def _decode(self) -> None:
        self._turn += 1
        if not self._active:
            return
        turn = self._turn
        left = max(self._active[0][0] - self._tokens, 0.0)
        call_after(self._env, left * self._step_s(), lambda: self._on_decoded(turn))

    def _on_decoded(self, turn: int) -> None:
        if turn != self._turn or self._batch:
            return
        self._settle()
        self._finish_decoded()
        if not self._batch:
            self._decode()

    def _finish_decoded(self) -> None:
        while self._active and self._active[0][0] - self._tokens < _ALMOST:
            self._finish(heapq.heappop(self._active)[2])

    def _finish(self, request: ServedRequest) -> None:
        request.done_s = self._env.now
        self._release(request)
        self._ended(self, request)
