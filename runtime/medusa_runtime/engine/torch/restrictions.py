"""Restrictions: allowed tokens, words that must not come, and biases, as tensors that equal sequences share."""

from __future__ import annotations

import threading
from array import array
from dataclasses import replace
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..serving.sequence import Sequence

_MANY = 8  # more than an eighth of the vocabulary is kept as a whole row, which is faster to use


class Restrictions:
    """The changes that allowed_token_ids, bad_words and logit_bias make to logits (fp32 [vocab]).

    Each may name the whole vocabulary, and a request has up to 128 sequences. So ``of`` gives sequences with equal
    values the same object, which nothing changes.
    """

    _known: ClassVar[WeakValueDictionary[bytes, Restrictions]] = WeakValueDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        params = sequence.params
        self._values = params.allowed_token_ids, params.bad_words, params.logit_bias
        self._bad_words = sequence.bad_words
        self._on: dict[torch.device, Restrictions] = {}
        allowed = params.allowed_token_ids
        self._allowed: Tensor | None = None  # int64, or the others as a mask
        self._forbidden: Tensor | None = None  # bool [vocab]
        if allowed is not None and len(allowed) * _MANY > vocab_size:
            forbidden = bytearray(b"\x01") * vocab_size
            for token in allowed:
                forbidden[token] = 0
            self._forbidden = torch.frombuffer(forbidden, dtype=torch.bool)
        elif allowed is not None:
            self._allowed = torch.tensor(allowed, dtype=torch.long)
        self._words = _Words(sequence.bad_words)
        bias = params.logit_bias or {}
        self._is_biased = bool(bias)
        self._biased: Tensor | slice = slice(None)
        if len(bias) * _MANY > vocab_size:
            biases = array("f", bytes(4 * vocab_size))
            for token, value in bias.items():
                biases[token] = value
            self._biases = torch.frombuffer(biases, dtype=torch.float32)
        else:
            self._biased, self._biases = torch.tensor(list(bias), dtype=torch.long), torch.tensor(list(bias.values()))

    @classmethod
    def of(cls, sequence: Sequence, vocab_size: int) -> Restrictions:
        """Return a sequence's restrictions, and let it share their values with others that have the same."""
        params = sequence.params
        if params.allowed_token_ids is None and not params.logit_bias and not sequence.bad_words:
            return cls(sequence, vocab_size)
        key = _key(sequence, vocab_size)
        with cls._lock:
            found = cls._known.get(key)
        if found is None:
            made = cls(sequence, vocab_size)  # without the lock: other requests need not wait for a large one
            with cls._lock:
                found = cls._known.setdefault(key, made)
        allowed, words, bias = found._values
        sequence.params = replace(params, allowed_token_ids=allowed, bad_words=words, logit_bias=bias)
        sequence.request = replace(sequence.request, params=sequence.params)
        sequence.bad_words = found._bad_words
        return found

    def on(self, device: torch.device) -> Restrictions:
        """Return the same restrictions on a device."""
        if self._biases.device == device:
            return self
        if device not in self._on:
            moved = Restrictions.__new__(Restrictions)
            moved.__dict__.update(self.__dict__, _on={})
            for name in ("_allowed", "_forbidden", "_biased", "_biases"):
                if isinstance(tensor := getattr(self, name), Tensor):
                    setattr(moved, name, tensor.to(device))
            self._on[device] = moved
        return self._on[device]

    def apply(self, logits: Tensor, sequence: Sequence) -> None:
        """Change a sequence's logits in place."""
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill_(float("-inf"))
            logits[self._allowed] = kept
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, float("-inf"))
        if self._bad_words:
            logits[torch.tensor(self._words.completing(sequence), dtype=torch.long)] = float("-inf")
        if self._is_biased:
            logits[self._biased] += self._biases


def _key(sequence: Sequence, vocab_size: int) -> bytes:
    """Return a digest of a sequence's restrictions: equal ones have the same, and others do not."""
    from hashlib import blake2b  # which loads OpenSSL; most requests have no restrictions

    params = sequence.params
    bias = params.logit_bias or {}
    parts = (
        repr((vocab_size, params.allowed_token_ids is None, params.bad_words, sequence.bad_words)).encode(),
        array("q", params.allowed_token_ids or ()).tobytes(),
        array("q", bias).tobytes(),
        array("d", bias.values()).tobytes(),
    )
    digest = blake2b(repr(tuple(map(len, parts))).encode(), digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()


class _Words:
    """Words that must not be generated, by what is before their last token."""

    def __init__(self, words: list[list[int]]) -> None:
        self._single = [word[0] for word in words if len(word) == 1]
        # The last token before the last one → all tokens before it → the tokens that complete a word.
        self._longer: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for word in words:
            if len(word) > 1:
                beginnings = self._longer.setdefault(word[-2], {})
                beginnings.setdefault(tuple(word[:-1]), []).append(word[-1])

    def completing(self, sequence: Sequence) -> list[int]:
        """Return the tokens that would complete a word, of which the completion ends with all tokens but the last."""
        found, tokens = self._single, sequence.tokens
        if sequence.generated:
            for before, last in self._longer.get(tokens[-1], {}).items():
                if sequence.generated >= len(before) and tuple(tokens[-len(before) :]) == before:
                    found = found + last
        return found
