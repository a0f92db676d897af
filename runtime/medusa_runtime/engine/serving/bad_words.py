"""Words that a completion must not contain, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import RequestError, json_excerpt
from .tokenizer import Tokenizer

MOST_SEQUENCES = 128  # vLLM's limit


def bad_word_tokens(words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token sequences that vLLM forbids for some words: each at the beginning of a text, and inside it.

    The form with a space before it counts if it has as many tokens, and another first one. Raises RequestError for a
    word without tokens, and for too many sequences.
    """
    found: list[list[int]] = []
    for word in dict.fromkeys(words):
        plain, spaced = (tokenizer.encode(prefix + word.lstrip(), False) for prefix in ("", " "))
        if not plain:
            raise RequestError(
                f"bad_words: expected words of at least one token, found {json_excerpt(word)}", "bad_words"
            )
        found.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    if len(found) > MOST_SEQUENCES:
        raise RequestError(
            f"bad_words: expected at most {MOST_SEQUENCES} with their forms after a space, found {len(found)}",
            "bad_words",
        )
    return found
