"""Files of hostile tokenizers that a short text would turn into gigabytes or minutes are refused; real ones are not."""

from __future__ import annotations

import base64
import itertools
import json
import random
import struct
from typing import Any

import pytest
from medusa_runtime.engine.serving.tokenizer import Tokenizer
from medusa_runtime.engine.serving.tokenizer_limits import _needed
from medusa_runtime.errors import CorruptError
from medusa_runtime.timeline import Timeline

ASCII = {"½": "1/2", "…": "...", "—": "--", "ﬁ": "fi", "ﬂ": "fl", "™": "TM", "®": "(R)", "©": "(C)"}
LETTERS = {chr(97 + i): i for i in range(26)}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*normalizers: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


def charsmap(text: str) -> dict[str, Any]:
    trie = bytes(1024)
    table = struct.pack("<I", len(trie)) + trie + b"x\0" + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def loaded(**parts: Any) -> Tokenizer:
    model = {"type": "BPE", "vocab": LETTERS, "merges": []}
    tokenizer = Tokenizer(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}).encode(), Timeline.create("test")
    )
    tokenizer.wait(26)
    return tokenizer


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": replace("a", "b" * 1_000_000)},
        {"normalizer": sequence(*[replace("a", "aa")] * 30)},
        {"normalizer": sequence(replace("a", "b" * 9), replace("b", "c" * 9))},
        {"normalizer": replace(".", "b" * 100, "Regex")},
        {"normalizer": sequence(*[replace("", "ab", "Regex")] * 10)},
        {"normalizer": sequence(replace("a", "b" * 9), replace("b+", "c" * 9, "Regex"))},
        {"normalizer": sequence(*[replace(r"a|\S+", "ab" * 2, "Regex")] * 4)},
        {"normalizer": sequence(*[replace("(?#comment)a(?#comment){0,1}", "bc" * 2, "Regex")] * 4)},
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["a" * 129, -2.0]]}},
        {"normalizer": sequence(sequence(replace("a", "b" * 100)))},
        {"normalizer": {"type": "Prepend", "prepend": "b" * 1_000_000}},
        {"normalizer": charsmap("b" * 100_000)},
        {"decoder": replace("a", "b" * 1_000_000)},
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "aa")] * 30}},
        {"model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": LETTERS,
                   "max_input_chars_per_word": 10**9}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 100
                            + [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [
                            {"Sequence": {"id": "A", "type_id": 0}},
                            {"Sequence": {"id": "B", "type_id": 0}}],
                            "special_tokens": {"a": {"id": "a", "ids": [0] * 1000, "tokens": ["a"] * 1000}}}},
    ],
)  # fmt: skip
def test_what_makes_a_text_much_longer_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match=r"tokenizer\.json: expected .* found more in its "):
        loaded(**parts)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))},
        {"normalizer": sequence(*(replace(one, many) for one, many in ASCII.items()))},
        {"normalizer": sequence(replace("\n", " [LINE] ", "Regex"), replace("\t", " [TAB] ", "Regex"))},
        {"normalizer": sequence(replace(r"https?://\S+|www\.\S+", "[URL]", "Regex"),
                                replace(r"[\w.+-]+@[\w-]+\.[\w.-]+", "[EMAIL]", "Regex"),
                                replace(r"\+?\d{2,}", "[NUM]", "Regex"))},
        {"normalizer": sequence(charsmap("ab" * 9), replace(" {2,}", " ", "Regex"), {"type": "NFKC"})},
        {"decoder": {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}},
        {"model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": LETTERS,
                   "max_input_chars_per_word": 100}},
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["▁" * 64, -2.0]]}},
    ],
)  # fmt: skip
def test_tokenizers_as_they_are_saved_are_taken(parts: dict[str, Any]) -> None:
    assert loaded(**parts).encode("a", add_special_tokens=True) is not None


PARTS = [*"ab1,]})(|?*+{[^$.-&:", "(?:", "(?i)", "(?=", "(?#a)", "(?x)", "{2}", "{,2}", "{0,}", "++", "??"]
PARTS += [r"\d", r"\S", r"\(", r"\|", r"\]", r"\n", r"\K", r"\x61", "[ab]", "[^a]", "[a|b]", "[]a]", "[[:alpha:]]"]


def test_a_text_without_the_needed_characters_has_no_match() -> None:
    """For any regular expression that the package takes, as it reads it."""
    from tokenizers import Regex, normalizers

    dice, checked = random.Random(5), 0
    texts = ["".join(text) for length in range(4) for text in itertools.product("ab1,]A\n(|", repeat=length)]
    while checked < 500:
        pattern = "".join(dice.choices(PARTS, k=dice.randint(1, 6)))
        try:
            normalizer = normalizers.Replace(Regex(pattern), "Z")
        except Exception:  # noqa: BLE001 - the package raises bare Exception
            continue
        needed = _needed(pattern)
        if not needed or not all(needed):
            continue
        checked += 1
        for text in dice.sample(texts, 40):
            if all(one - set(text) for one in needed):
                assert normalizer.normalize_str(text) == text, pattern
