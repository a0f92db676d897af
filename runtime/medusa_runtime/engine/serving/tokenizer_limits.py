"""Limits for a tokenizer.json: it must not turn a few characters into gigabytes, nor take minutes for a word."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

from ...errors import CorruptError

_MOST_GROWTH = 64  # of a text by all replacements, one after the other; those of real tokenizers make it no longer
_MOST_WORD = 1000  # characters; BERT has 100, and the time grows with their cube
_MOST_PIECES = 10_000  # that are added to each text
_MOST_ADDED = 1000  # characters before each text
_SYNTAX = frozenset("\\^$.|?*+()[]{}")  # characters with a meaning of their own in a regular expression


def check_limits(tokenizer: Any) -> None:
    """Raise CorruptError if a tokenizer of the package ``tokenizers`` would use up the memory for a short text."""
    for name in ("normalizer", "decoder"):
        parts = list(_parts(_described(getattr(tokenizer, name))))
        if _growth(parts) > _MOST_GROWTH:
            raise _error(f"replacements that make a text at most {_MOST_GROWTH} times as long", name)
        if sum(len(str(part.get("prepend", ""))) for part in parts) > _MOST_ADDED:
            raise _error(f"at most {_MOST_ADDED} characters to prepend", name)
    longest = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if longest > _MOST_WORD:
        raise _error(f"max_input_chars_per_word of at most {_MOST_WORD}", "model")
    for part in _parts(_described(tokenizer.post_processor)):
        if _added(part) > _MOST_PIECES:
            raise _error(f"at most {_MOST_PIECES} tokens to add to a text", "post_processor")


def _described(component: Any) -> Any:
    """Return a component as the file describes it. Only this part is made into text again, not the vocabulary."""
    return {} if component is None else json.loads(component.__getstate__())


def _parts(described: Any) -> Iterator[dict[str, Any]]:
    """Yield a component, and those of a sequence. The package has checked their form, and how deep they lie."""
    if isinstance(described, list):
        for one in described:
            yield from _parts(one)
    elif isinstance(described, dict):
        yield described
        for name in ("normalizers", "decoders", "processors"):
            yield from _parts(described.get(name))


def _growth(parts: list[dict[str, Any]]) -> int:
    """Return how many characters a character may become at most. What a replacement writes, a later one may replace."""
    growth, written = 1, set[str]()
    for part in parts:
        if part.get("type") == "Precompiled":
            growth *= _longest_mapped(part["precompiled_charsmap"])
        if part.get("type") != "Replace":
            continue
        content, text = part["content"], part["pattern"].get("String")
        regex = part["pattern"].get("Regex")
        if regex and not set(regex) & _SYNTAX:
            text = regex  # matches only itself
        if text and not set(text) <= written:  # each match has a character of the text itself
            growth = max(growth, len(content))
        else:
            growth *= max(1, len(content) + (text is None and len(content) > 1))  # it may match where nothing is
        written |= set(content)
    return growth


def _longest_mapped(charsmap: str) -> int:
    """Return the length of the longest text in sentencepiece's table: a trie with its size before it, and C strings."""
    table = b64decode(charsmap)
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="ignore")) for text in texts))


def _added(part: dict[str, Any]) -> int:
    """Return how many tokens a template adds to a text."""
    sizes = {name: len(one["ids"]) for name, one in (part.get("special_tokens") or {}).items()}
    templates = [one for one in (part.get("single"), part.get("pair")) if isinstance(one, list)]
    pieces = [piece for template in templates for piece in template]
    return sum(sizes.get(piece["SpecialToken"]["id"], 1) if "SpecialToken" in piece else 1 for piece in pieces)


def _error(expected: str, where: str) -> CorruptError:
    return CorruptError(
        f"tokenizer.json: expected {expected}, found more in its {where}; if it is yours, save one that stays below"
    )
