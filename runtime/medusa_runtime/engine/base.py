"""The engine protocol, and the values that cross the socket between function process and engine process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from array import array


class StructuredOutputs(NamedTuple):
    """The form that generated text must have. ``kind`` says what ``text`` is: json_schema, regex, choice or grammar.

    The text of a choice is a JSON list of strings, that of a grammar is Lark or GBNF. The kind tagged_json is one of
    several JSON texts, each behind its own tag: a JSON list of [tag, schema].

    With a ``closing`` tag, all text up to this tag is free, and the form begins behind it. With an ``opening`` tag as
    well, there is free text only if the generated text begins with that tag. With a ``header``, the form begins behind
    it, whether there is free text or not. A tag is special tokens and text, such as ``<|start|>assistant``.
    """

    kind: str
    text: str
    opening: str = ""
    closing: str = ""
    header: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Names and defaults are vLLM's.

    ``temperature=0`` is greedy. ``logprobs`` is how many of the most likely tokens are reported with each token, and
    ``prompt_logprobs`` with each of the prompt's. ``max_tokens=0`` computes the prompt and generates nothing.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt to continue, as text or token ids. ``id`` is unique among the running requests.

    ``adapter`` names the LoRA adapter to use; None uses the base model. Only requests with the same ``cache_salt``
    share what they compute of prompts that begin alike.
    """

    id: str
    prompt: str | tuple[int, ...]
    params: SamplingParams
    add_special_tokens: bool = True
    adapter: str | None = None
    cache_salt: str | None = None


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the most likely alternatives as (id, text, logprob).

    The first token of a prompt has no log-probability.
    """

    token_id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, str, float], ...] = ()


class PromptLogprobs(NamedTuple):
    """The log-probabilities of a prompt's tokens, from the second one on, in flat arrays: a prompt may be long.

    Each token has ``width`` places in ``token_ids`` (int32) and ``logprobs`` (float32): its own, then those of the
    most likely tokens. ``ranks`` (int32) has one place for each token: how many tokens are at least as likely.
    ``texts`` has the text of each token id, and ``texts_here`` those of places whose text depends on what is before.
    An engine delivers them without texts, which its ``with_texts`` makes.
    """

    first: tuple[int, str]  # id and text of the prompt's first token
    width: int
    token_ids: array[int]
    logprobs: array[float]
    ranks: array[int]
    texts: dict[int, str]
    texts_here: dict[int, str]

    def tokens(self) -> Iterator[TokenLogprob]:
        """Yield the prompt's tokens with their alternatives."""
        yield TokenLogprob(*self.first, None)
        for at in range(0, len(self.token_ids), self.width):
            own, *top = (
                (self.token_ids[place], self._text(place), self.logprobs[place]) for place in range(at, at + self.width)
            )
            yield TokenLogprob(*own, tuple(top))

    def _text(self, place: int) -> str:
        text = self.texts_here.get(place)
        return self.texts.get(self.token_ids[place], "") if text is None else text


class Delta(NamedTuple):
    """What one step added to a request. The last delta has a ``finish_reason``: stop, length, cancelled or error."""

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: tuple[str, str] | None = None  # (code, message) of a MedusaError, with finish_reason "error"
    cached_tokens: int = 0  # of the prompt: not computed, but found in the KV cache
    prompt_logprobs: PromptLogprobs | None = None  # once, with the first token


EXPOSITION = "exposition"  # a key of an engine's stats


class EngineInfo(NamedTuple):
    """The facts about an engine and its model that the function process needs."""

    engine: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_tokens: int  # how many tokens fit into the KV cache


class Embedding(NamedTuple):
    """A text's vector, as little-endian float32 bytes, and the number of its tokens."""

    tokens: int
    data: bytes


class EmbedOptions(NamedTuple):
    """How an encoder or a classifier reads its inputs, and what it makes of its vectors.

    ``dimensions``: keep this many numbers of each vector, and scale it to length 1 again. ``truncate``: cut inputs to
    this many tokens; -1 cuts at the model's limit. They lose their end, or their beginning with ``truncate_left``.
    ``most_first`` and ``most_second``: cut the first or the second text of each pair to this many tokens before that.
    ``classify``: expect a classifier, whose vectors are the probabilities of the labels. ``activate``: whether vectors
    are scaled to length 1, or a classifier's numbers become probabilities; None leaves that to the checkpoint.
    """

    dimensions: int | None = None
    truncate: int | None = None
    truncate_left: bool = False
    most_first: int | None = None
    most_second: int | None = None
    add_special_tokens: bool = True
    classify: bool = False
    activate: bool | None = None


class Engine(Protocol):
    """Continuous batching over one model. One thread calls ``run``; any thread may call ``add``, ``cancel``, ``stats``.

    An encoder's engine also has ``embed`` (``encoder/engine.py``), and one that scores prompts ``with_texts``.
    Calls that take milliseconds, or wait for another process, may be named in ``slow_calls``: they get threads of their
    own.
    """

    info: EngineInfo

    def add(self, request: GenerateRequest, sink: Callable[[Delta], None]) -> None:
        """Queue a request. The thread of ``run`` calls ``sink`` with each of its deltas, in order.

        Raises RequestError (too long, bad parameter) and OverloadedError (queue full) at once.
        """

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its KV blocks; unknown ids are ignored."""

    def run(self, stop: Event) -> None:
        """Serve until ``stop`` is set. Raises only when the engine as a whole is broken."""

    def wait_ready(self) -> None:
        """Block until the weights are applied. Raises what made that impossible (CorruptError, MismatchError …)."""

    def tokenize(self, text: str, add_special_tokens: bool, **cut: Any) -> list[int]:
        """Return a text's token ids. The other arguments are the fields of a Cut (``engine/serving/cut.py``)."""

    def detokenize(self, token_ids: list[int]) -> str: ...

    def stats(self) -> dict[str, Any]:
        """Return the numbers for /metrics: running, waiting, kv_tokens_used, generated_tokens_total and others.

        A text with the key EXPOSITION has further lines for the page, in Prometheus' text format.
        """

    def close(self) -> None: ...
