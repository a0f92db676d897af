"""The checkpoint's tokenizer, read while the weights are on their way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import ContextLengthError, CorruptError, EngineError, MedusaError, OverloadedError, RequestError
from ...process_limits import as_limit_error
from ...timeline import Timeline
from ..base import EngineInfo
from .cut import Cut
from .token_texts import TokenTexts
from .tokenizer_limits import check_limits
from .validation import check_token_ids, most_characters

logger = logging.getLogger(__name__)

_LONG_CHARACTERS = 1 << 16  # a shorter text is tokenized so fast that estimating its length first saves nothing
# The tokenizers package keeps Python's lock while it tokenizes one text, but not while it tokenizes a batch. From this
# length on, where it takes some ten milliseconds, a text is a batch of one, so that other requests go on meanwhile.
_BATCH_CHARACTERS = 1 << 12
_BATCH_TOKENS = 1 << 12
_MOST_TOKENS = 1 << 20  # the most ids to decode, unless the context has more: with their text, each takes 60 bytes
_TURN_S = 20.0  # how long a long text waits for others, less than a client waits for the answer
_HINT = (
    "give the prompt as token ids, or put a tokenizer.json beside the weights (from a tokenizer.model, or vocab.json "
    "and merges.txt, transformers makes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
)
_kept: list[tuple[bytes, Any]] = []  # the tokenizers of a snapshot, each with its tokenizer.json


class Tokenizer:
    """A checkpoint's tokenizer.json, which a thread loads. The first use waits for it.

    Without the file (``present`` is False), only token ids can be served. ``ends_with`` is a token that each text ends
    with, also where the file does not say so.
    """

    def __init__(self, data: bytes | None, timeline: Timeline, ends_with: str | None = None) -> None:
        self.present = data is not None
        self._ends_with = ends_with
        self._data = data
        self._timeline = timeline
        self._tokenizer: Any = None
        self.texts = TokenTexts(self.pieces, self.decode_each)
        self._longest_piece: int | None = None
        self._long_text = threading.Lock()
        self._error: MedusaError | None = None
        self._thread = threading.Thread(target=self._load, name="tokenizer", daemon=True)
        if self.present:
            self._thread.start()

    def wait(self, vocab_size: int) -> None:
        """Wait until the tokenizer is loaded, and warn if it has more tokens than the model, or if there is none.

        Raises CorruptError if tokenizer.json cannot be read.
        """
        if not self.present:
            logger.warning(
                "this checkpoint has no tokenizer.json: only requests with token ids can be answered; %s", _HINT
            )
            return
        tokens = self._loaded().get_vocab_size()
        if tokens > vocab_size:
            logger.warning(
                "tokenizer.json has %d tokens, the model only %d: texts with the others will be refused. "
                "Does it belong to this checkpoint?",
                tokens,
                vocab_size,
            )

    def check_length(self, text: str, most_tokens: int, *, name: str = "prompt") -> None:
        """Refuse a text that is certainly longer than ``most_tokens``, without tokenizing it, which can take minutes.

        ``name`` is what the error calls the text. Raises ContextLengthError.
        """
        if not self.present or len(text) < _LONG_CHARACTERS:
            return
        if self._longest_piece is None:
            self._longest_piece = max(map(len, self._loaded().get_vocab()), default=1)
        if len(text) > most_tokens * self._longest_piece:
            raise ContextLengthError(
                f"this model's maximum context length is {most_tokens} tokens, and the {name} has {len(text)} "
                f"characters, which are more; expected a shorter {name}",
                name,
            )
        self.check_size(text, most_tokens, name=name)

    def check_size(self, text: str, most_tokens: int, *, name: str = "prompt") -> None:
        """Refuse a text that takes too much memory and time to tokenize, for a context of ``most_tokens``.

        ``name`` is what the error calls the text. Raises RequestError.
        """
        if len(text) > (most := most_characters(most_tokens)):
            raise RequestError(
                f"{name}: expected at most {most} characters in one text, found {len(text)}; split it", name
            )

    def tokenize(self, text: str, add_special_tokens: bool, info: EngineInfo, cut: Cut) -> list[int]:
        """Return the token ids of a text that a client sent. Raises RequestError like ``check_size`` and ``encode``."""
        self.check_size(text, info.max_model_len)
        if cut:
            return self.encode_cut([text], cut, add_special_tokens)[0]
        return self.encode(text, add_special_tokens)

    def detokenize(self, token_ids: list[int], info: EngineInfo) -> str:
        """Return the text of token ids that a client sent.

        Raises RequestError for too many ids, for one that is not in the vocabulary, and without a tokenizer.json.
        """
        most = max(_MOST_TOKENS, info.max_model_len)
        if len(token_ids) > most:
            raise RequestError(
                f"token_ids: expected at most {most} in one request, found {len(token_ids)}; split them", "token_ids"
            )
        check_token_ids("token_ids", token_ids, info)
        return self.decode(token_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids. Raises RequestError without a tokenizer.json, or if it fails on this text."""
        tokenizer = self._for_text()
        text = _without_surrogates(text)
        with self._turn(len(text)), _failures_as_errors():
            if len(text) < _BATCH_CHARACTERS:
                encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            else:
                [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts as one input, and for each token the text it belongs to, 0 or 1.

        Raises RequestError like ``encode``.
        """
        tokenizer = self._for_text()
        with self._turn(len(first) + len(second)), _failures_as_errors():
            pair = _without_surrogates(first), _without_surrogates(second)
            if sum(map(len, pair)) < _BATCH_CHARACTERS:
                encoding = tokenizer.encode(*pair)
            else:
                [encoding] = tokenizer.encode_batch_fast([pair])
        return list(encoding.ids), list(encoding.type_ids)

    def encode_cut(self, texts: Sequence[str], cut: Cut, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """Return the token ids of a text or of a pair of texts, cut, and for each token its text as ``encode_pair``.

        Raises RequestError like ``encode``.
        """
        tokenizer = self._for_text()
        with self._turn(sum(map(len, texts))), _failures_as_errors():
            given = [_without_surrogates(text) for text in texts]
            parts = tokenizer.encode_batch_fast(given, add_special_tokens=False)
            special = tokenizer.num_special_tokens_to_add(len(parts) == 2) if add_special_tokens else 0
            cut.texts(parts, special)
            encoding = tokenizer.post_process(*parts, add_special_tokens=add_special_tokens)
        return cut.ids(list(encoding.ids)), cut.ids(list(encoding.type_ids))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        if not self.present:
            raise RequestError(
                f"token_ids: this checkpoint has no tokenizer.json, so they have no text; {_HINT}", "token_ids"
            )
        tokenizer = self._loaded()
        with _failures_as_errors():
            if len(token_ids) < _BATCH_TOKENS:
                text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
            else:
                [text] = tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def decode_each(self, sequences: list[list[int]]) -> list[str]:
        """Return the text of each sequence of tokens."""
        if len(sequences) <= 1:  # a batch of one takes three times as long
            return list(map(self.decode, sequences))
        with _failures_as_errors():
            texts: list[str] = self._loaded().decode_batch(sequences, skip_special_tokens=False)
        return texts

    def pieces(self, token_ids: list[int]) -> list[str | None]:
        """Return each token as the vocabulary has it; None for an id without one."""
        tokenizer = self._loaded()
        return [tokenizer.id_to_token(token) for token in token_ids]

    @contextmanager
    def _turn(self, characters: int) -> Iterator[None]:
        """Let one long text be tokenized at a time: many at once would take gigabytes. Raises OverloadedError."""
        if characters <= _LONG_CHARACTERS:
            yield
            return
        if not self._long_text.acquire(timeout=_TURN_S):
            raise OverloadedError(f"other long texts were tokenized for {_TURN_S:g} s; try again later")
        try:
            yield
        finally:
            self._long_text.release()

    def _for_text(self) -> Any:
        """Return the loaded tokenizer. Raises RequestError without a tokenizer.json."""
        if not self.present:
            raise RequestError(
                f"prompt: this checkpoint has no tokenizer.json, so text cannot be used; {_HINT}", "prompt"
            )
        return self._loaded()

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            self._thread.join()
            if self._error is not None:
                raise self._error
        return self._tokenizer

    def _load(self) -> None:
        assert self._data is not None
        try:
            with self._timeline.stage("tokenizer", bytes=len(self._data)) as detail:
                kept = next((parsed for text, parsed in _kept if text == self._data), None)
                detail["kept"] = kept is not None
                tokenizer = parse(self._data) if kept is None else kept
            if self._ends_with is not None:
                _end_texts(tokenizer, self._ends_with)
            self._tokenizer = tokenizer  # last, because others use it without waiting once it is there
        except MedusaError as error:
            self._error = error
        self._data = None


def keep(data: bytes) -> None:
    """Parse a tokenizer.json, and keep the tokenizer for engines, in this process or its children, that get the same.

    Parsing the one of Llama 3 takes half a second, in which no other thread of Python runs. Raises like ``parse``.
    """
    _kept.append((data, parse(data)))


def parse(data: bytes) -> Any:
    """Return the tokenizer of a tokenizer.json. Raises CorruptError for an unusable one, EngineError and LimitError."""
    try:
        from tokenizers import Tokenizer as Parsed

        with _failures_as_errors(only_panics=True):
            parsed = Parsed.from_buffer(data)
            # The file may ask for padding or truncation, which are meant for batches in training, not for prompts.
            parsed.no_padding()
            parsed.no_truncation()
            check_limits(parsed)
    except CorruptError:
        raise
    except ImportError as error:
        raise as_limit_error(error) or EngineError(f"the tokenizers package cannot be imported: {error}") from error
    except Exception as error:  # noqa: BLE001 - the package raises bare Exception
        pointer = data.startswith(b"version https://git-lfs")
        wrong = "but found a Git LFS pointer to one; run git lfs pull" if pointer else f"which it is not: {error}"
        raise CorruptError(
            f"tokenizer.json: expected the JSON of a fast tokenizer, {wrong}{'' if pointer else '; fetch it again'}"
        ) from None
    return parsed


def _end_texts(tokenizer: Any, token: str) -> None:
    """Let a tokenizer put a token behind each text, unless it does so already, or has no such token.

    Raises CorruptError for a token that cannot be put there.
    """
    from tokenizers.processors import Sequence, TemplateProcessing

    try:
        with _failures_as_errors(only_panics=True):
            number = tokenizer.token_to_id(token)
            if number is None or tokenizer.encode("").ids[-1:] == [number]:
                return
            template = TemplateProcessing(["$A", token], ["$A", token, "$B:1", f"{token}:1"], [(token, number)])
            before = tokenizer.post_processor
            tokenizer.post_processor = template if before is None else Sequence([before, template])
    except Exception as error:  # noqa: BLE001 - the package raises bare Exception
        raise CorruptError(
            f"tokenizer_config.json: eos_token {token[:80]!r} cannot end texts: {error!s:.200}"
        ) from None


@contextmanager
def _failures_as_errors(*, only_panics: bool = False) -> Iterator[None]:
    """Turn a failure of the tokenizers package into a RequestError: a bare Exception, or a panic, which is none.

    The package fails, for example, when a regular expression gives up on a text, or has no token for unknown words.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException" and (only_panics or type(error) is not Exception):
            raise
        raise RequestError(f"this model's tokenizer failed at this text: {error!s:.200}", "prompt") from None


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON may contain but which are not valid text."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
