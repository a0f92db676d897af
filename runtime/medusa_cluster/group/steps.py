"""The description of a group's step, which the leader sends to the workers. They allocate nothing and decide nothing.

It says which tokens of which sequences run, and which blocks of the cache have their keys and values. The last worker
samples with a random number that the leader has drawn, so seeds and their state stay with the leader.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from medusa_runtime.engine import frames
from medusa_runtime.engine.base import GenerateRequest
from medusa_runtime.engine.serving.sequence import NO_TOKEN, RandomStream, SampledToken, Sequence, Span
from medusa_runtime.engine.serving.transcript import Transcript
from medusa_runtime.engine.torch.sampler import GREEDY_BELOW
from medusa_runtime.errors import EngineError
from torch import Tensor


@dataclass(slots=True)
class _SentState:
    """The workers' knowledge of a sequence: its number, its block table, and how many blocks of it they have."""

    number: int
    blocks: list[int]
    count: int = 0


class StepWriter:
    """The leader's side. It describes steps, each with only what the workers do not know yet."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._known: dict[Sequence, _SentState] = {}
        self._gone: list[int] = []

    def describe(self, spans: list[Span], allowed: Mapping[Sequence, bytes] = MappingProxyType({})) -> dict[str, Any]:
        """Return the body of a step message. Draws the random number of each sequence that gets a token in this step.

        ``allowed`` has, for each sequence that follows a grammar, the bits of ``packed_bits`` for its next token.
        """
        described = [self._span(span) for span in spans]
        for description, span in zip(described, spans, strict=True):
            if span.sequence in allowed:
                description["allowed"] = base64.b64encode(allowed[span.sequence]).decode()
        gone, self._gone = self._gone, []
        return {"spans": described, "gone": gone}

    def _span(self, span: Span) -> dict[str, Any]:
        sequence, start, stop = span
        description: dict[str, Any] = {"start": start, "stop": stop, "tokens": sequence.tokens[start:stop]}
        known = self._known.get(sequence)
        if known is None:
            known = self._known[sequence] = _SentState(next(self._numbers), sequence.blocks)
            description["request"] = frames.request_to_frame(GenerateRequest(sequence.id, (), sequence.params))
            description["prompt"] = sequence.prompt_length
            if sequence.bad_words:
                description["bad_words"] = sequence.bad_words
        elif known.blocks is not sequence.blocks:
            known.blocks, known.count = sequence.blocks, 0
        if start and not known.count:  # the tokens whose keys and values an earlier sequence has left
            description["before"] = sequence.tokens[:start]
        description |= {"number": known.number, "keep": known.count, "blocks": sequence.blocks[known.count :]}
        known.count = len(sequence.blocks)
        if sequence.prompt_scores is not None and stop < len(sequence.tokens):
            description["next"] = sequence.tokens[stop]  # its score is that of the last token before it
        if stop == len(sequence.tokens):
            description["ends"] = True
            if sequence.params.temperature >= GREEDY_BELOW:
                description["roll"] = sequence.random_stream.draw()
        return description

    def forget(self, sequence: Sequence) -> None:
        """Make the workers forget a sequence that has ended, with the next step."""
        known = self._known.pop(sequence, None)
        if known is not None:
            self._gone.append(known.number)


class _DrawnNumber:
    """A random number that the leader has drawn, in the form of a sequence's ``RandomStream``."""

    def __init__(self, value: float) -> None:
        self._value = value

    def draw(self) -> float:
        return self._value


class StepReader:
    """The worker's side. It has copies of the sequences, as far as attention and sampling need them."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def read(self, values: dict[str, Any]) -> list[Span]:
        """Return the spans of a step. Raises EngineError if the step cannot be understood."""
        try:
            for number in values["gone"]:
                self._sequences.pop(number, None)
            return [self._span(description) for description in values["spans"]]
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise EngineError(f"a step of the group could not be read: {error!r}") from None

    def _span(self, description: dict[str, Any]) -> Span:
        sequence = self._sequences.get(description["number"])
        if sequence is None:
            sequence = self._sequences[description["number"]] = self._begin(description)
        start, stop = int(description["start"]), int(description["stop"])
        if "before" in description:
            sequence.tokens = [*map(int, description["before"])]
        del sequence.tokens[start:]
        if len(sequence.tokens) != start:
            raise ValueError(f"{len(sequence.tokens)} tokens are known, and {start} are expected")
        sequence.tokens += map(int, description["tokens"])
        if "next" in description:
            sequence.tokens.append(int(description["next"]))
        sequence.blocks = [*sequence.blocks[: description["keep"]], *map(int, description["blocks"])]
        if "roll" in description:
            sequence.random_stream = _DrawnNumber(float(description["roll"]))  # type: ignore[assignment]
        return Span(sequence, start, stop)

    def _begin(self, description: dict[str, Any]) -> Sequence:
        sequence = Sequence(
            frames.request_from_frame(description["request"]),
            [],
            lambda _: None,
            limit=0,
            eos_token_ids=self._eos_token_ids,
            transcript=Transcript(None, (), include_stop=False),
            bad_words=[list(map(int, word)) for word in description.get("bad_words", ())],
        )
        sequence.prompt_length = int(description["prompt"])
        return sequence


def has_prompts(spans: list[Span]) -> bool:
    """Return whether a step runs several tokens of one sequence, as it does for a prompt."""
    return any(span.stop - span.start > 1 for span in spans)


def ending_spans(values: dict[str, Any], spans: list[Span]) -> list[int]:
    """Return which of the spans get a token in this step."""
    return [place for place in range(len(spans)) if values["spans"][place].get("ends")]


def packed_bits(allowed: Tensor) -> bytes:
    """Pack a boolean row [vocab_size] into bits. The first element is the lowest bit of the first byte."""
    row = torch.nn.functional.pad(allowed.to(torch.uint8), (0, -allowed.shape[0] % 8)).view(-1, 8)
    return bytes((row << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8).tolist())


def forbid(logits: Tensor, values: dict[str, Any], ends: list[int]) -> None:
    """Set logits to -inf, in place, for tokens that a sequence's grammar does not allow next.

    ``logits`` are [len(ends), vocab_size], ``values`` a step message's body, and ``ends`` the result of
    ``ending_spans``. Raises EngineError if the bits cannot be read.
    """
    for row, place in enumerate(ends):
        given = values["spans"][place].get("allowed")
        if given is None:
            continue
        try:
            bits = torch.frombuffer(bytearray(base64.b64decode(given)), dtype=torch.uint8)
        except (binascii.Error, TypeError, ValueError) as error:
            raise EngineError(f"the tokens that a grammar allows could not be read: {error}") from None
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1)[: logits.shape[1]].bool()
        logits[row].masked_fill_(~allowed.to(logits.device), float("-inf"))


def tokens_body(sampled: list[SampledToken], spans: list[Span]) -> dict[str, Any]:
    """Return the body of a tokens message, with the scores of the spans' prompts since the last one."""
    taken = [
        (place, span.sequence.prompt_scores.take())
        for place, span in enumerate(spans)
        if span.sequence.prompt_scores is not None
    ]
    scores = [[place, *(base64.b64encode(part).decode() for part in parts)] for place, parts in taken if parts[-1]]
    return {"tokens": [[one.token, one.logprob, list(one.top)] for one in sampled], "scores": scores}


def read_scores(values: dict[str, Any], spans: list[Span], vocab_size: int) -> None:
    """Add the scores in a tokens message to the prompts of the step's spans. Raises EngineError for wrong ones."""
    try:
        for place, *encoded in values.get("scores", ()):
            sequence = spans[place].sequence
            scores = sequence.prompt_scores
            ids, logprobs, ranks = map(base64.b64decode, encoded)
            found = array("i", ids), array("f", logprobs), array("i", ranks)
            if scores is None or scores.scored + len(found[2]) >= sequence.prompt_length:
                raise ValueError("there are more scores than tokens")  # noqa: TRY301
            if not len(found[0]) == len(found[1]) == (scores.count + 1) * len(found[2]):
                raise ValueError("the scores are incomplete")  # noqa: TRY301
            if not all(0 <= token < vocab_size for token in found[0]):
                raise ValueError("expected tokens of the vocabulary")  # noqa: TRY301
            scores.add(*found)
        for sequence, _, stop in spans:
            scores = sequence.prompt_scores
            if scores is not None and stop >= sequence.prompt_length > scores.scored + 1:
                raise ValueError("there are fewer scores than tokens")  # noqa: TRY301
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the scores of a group's step could not be read: {error!r}") from None


def read_tokens(values: dict[str, Any], count: int, vocab_size: int) -> list[SampledToken]:
    """Read the body of a tokens message for ``count`` sequences. Raises EngineError if it cannot be right."""
    try:
        found = [
            SampledToken(
                int(token), None if logprob is None else float(logprob), tuple((int(i), float(v)) for i, v in top)
            )
            for token, logprob, top in values["tokens"]
        ]
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise EngineError(f"the tokens of a group's step could not be read: {error!r}") from None
    named = [number for one in found for number in (one.token, *(token for token, _ in one.top)) if number != NO_TOKEN]
    if not all(0 <= number < vocab_size for number in named):
        raise EngineError(f"expected tokens below {vocab_size} of a group's step, found others")
    if len(found) != count:
        raise EngineError(f"expected {count} tokens of a group's step, found {len(found)}")
    return found


def undo_draw(sequence: Sequence) -> None:
    """Undo the random draw of a step whose token will never come."""
    if sequence.params.temperature >= GREEDY_BELOW:
        sequence.random_stream = RandomStream(sequence.random_stream.seed, sequence.random_stream.draws - 1)


__all__ = [
    "StepReader",
    "StepWriter",
    "ending_spans",
    "forbid",
    "has_prompts",
    "packed_bits",
    "read_scores",
    "read_tokens",
    "tokens_body",
    "undo_draw",
]
