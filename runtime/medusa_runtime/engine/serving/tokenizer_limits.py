"""Limits for a tokenizer.json: it must not turn a few characters into gigabytes, nor take minutes for a word."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

from ...errors import CorruptError

_MOST_GROWTH = 64  # of a text by all replacements, one after the other; those of real tokenizers make it no longer
_MOST_WORD = 1000  # characters; BERT has 100, and the time grows with their cube
_MOST_PIECES = 10_000  # that are added to each text
_MOST_ADDED = 1000  # characters before each text
_MOST_PIECE = 128  # characters of a piece of Unigram; the time for a text grows with the longest, which have 16
# An atom of a regular expression and how often it is repeated. A group is known by its bracket.
_ATOM = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\[\]\\])*\]|.)((?:\{[^}]*\}|[?*+])*)", re.DOTALL)
_SYNTAX = frozenset("\\|^$.?*+)]{}")  # atoms that stand for other characters than themselves, or for none
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | dict.fromkeys("dDwWsSbB", ".")


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
    if type(tokenizer.model).__name__ == "Unigram":
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=False)), default=0)
        if longest > _MOST_PIECE:
            raise _error(f"pieces of at most {_MOST_PIECE} characters", "model")
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
        needed = [set(text)] if text is not None else _needed(part["pattern"]["Regex"])
        if needed and all(one - written for one in needed):  # each match has a character of the text itself
            growth = max(growth, len(content))
        else:
            growth *= max(1, len(content) + (text is None and len(content) > 1))  # it may match where nothing is
        written |= set(content)
    return growth


def _needed(regex: str) -> list[set[str]]:
    """Return, for each alternative of a regular expression, characters that each match of it has; [] if unknown.

    Of an alternative with a group, only what stands before the group counts. One that begins inside of a group is
    listed, too, which makes the answer no less certain.
    """
    if "(?" in regex.replace("(?:", ""):  # a repetition behind a comment is of what stands before it
        return []
    found, in_group = [set[str]()], False
    for atom, repeated in _ATOM.findall(regex):
        escaped = atom[1:] if atom[0] == "\\" else ""
        if atom == "[" or (escaped.isalnum() and escaped not in _ESCAPES):  # a nested class, or what we do not know
            return []
        if atom == "|":
            found.append(set())
        in_group = atom == "(" or (in_group and atom != "|")
        if not in_group and not repeated.strip("+") and (escaped or len(atom) == 1):
            found[-1] |= set(_ESCAPES.get(escaped, escaped) or atom) - _SYNTAX
    return found


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
