"""One request on its way through the engine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..base import Delta, GenerateRequest
from ..torch.kv_cache import BLOCK_TOKENS
from .prompt_scores import PromptScores
from .transcript import Transcript

if TYPE_CHECKING:
    from ..structured.constraint import Constraint
    from ..torch.adapters import Adapter
    from ..torch.penalties import Adjustment


NO_TOKEN = -1


class SampledToken(NamedTuple):
    """A sampled token. With ``logprobs``, also its log-probability, and the most likely tokens as (id, logprob).

    It is ``NO_TOKEN`` if the request forbids every token.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sequence:
    """A request's prompt and completion (``tokens``). The KV cache holds the first ``computed`` tokens, in ``blocks``.

    ``limit`` is the number of tokens, prompt included, at which the sequence ends. ``end_token_ids`` are the token ids
    that end it (EOS and stop_token_ids). ``bad_words`` are token sequences that must not be generated. ``sink`` gets
    its deltas.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompt: list[int],
        sink: Callable[[Delta], None],
        *,
        limit: int,
        eos_token_ids: frozenset[int],
        transcript: Transcript,
        bad_words: Iterable[list[int]] = (),
    ) -> None:
        self.request = request
        self.params = request.params
        self.sink = sink
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.limit = limit
        self.eos_token_ids = frozenset() if request.params.ignore_eos else eos_token_ids
        self.end_token_ids = self.eos_token_ids | frozenset(request.params.stop_token_ids)
        self.transcript = transcript
        self.bad_words = list(bad_words)
        params = request.params
        # Whether its logits are never changed, but for min_tokens. All sequences of all steps are asked.
        self.is_plain = (
            params.repetition_penalty == 1
            and params.presence_penalty == 0
            and params.frequency_penalty == 0
            and not params.logit_bias
            and params.allowed_token_ids is None
            and not params.bad_words
        )
        self.computed = 0
        self.cached_tokens: int | None = None  # of the prompt, when the sequence was first scheduled
        self.blocks: list[int] = []
        self.slot: int | None = None  # of its state while it runs, where the model's layers keep one
        self.cancelled = False
        self.constraint: Constraint | None = None
        self.adapter: Adapter | None = None
        count = request.params.prompt_logprobs
        self.prompt_scores = None if count is None else PromptScores(count)  # until they are delivered
        self.adjustment: Adjustment | None = None  # of its logits, made when the first token is chosen
        seed = request.params.seed
        self.random_stream = RandomStream(int.from_bytes(os.urandom(8), "little") if seed is None else seed)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slots in the KV cache of the tokens [start, stop)."""
        blocks = self.blocks
        return [blocks[i // BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS for i in range(start, stop)]


class Span(NamedTuple):
    """The tokens [start, stop) of a sequence, to be run in one step."""

    sequence: Sequence
    start: int
    stop: int


class RandomStream:
    """A sequence's own random numbers, one for each sampled token, so they do not depend on other sequences.

    ``draws`` numbers are skipped: those that the sequence has used elsewhere.
    """

    def __init__(self, seed: int, draws: int = 0) -> None:
        self.seed = seed
        self.draws = 0
        self._random = random.Random(seed)
        for _ in range(draws):
            self.draw()

    def draw(self) -> float:
        """Return the next number, in [0, 1)."""
        self.draws += 1
        return self._random.random()
