"""Streaming detokenisation against decoding everything at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from medusa_runtime.engine.serving.detokenizer import Detokenizer
from tokenizers import Tokenizer, decoders, models

TEXT = "naïve café 😀🚀👩‍👩‍👧 日本語 Ωμέγα — done"


class Bytes:
    """One token a byte; what is no UTF-8 becomes U+FFFD, as byte-level decoders do it."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class ByteFallback:
    """Llama 2's kind: words with a leading mark, bytes for what is in no word, and the first space dropped."""

    def __init__(self) -> None:
        vocab = {"<unk>": 0, "▁a": 1, "▁word": 2, "s": 3, "▁": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
        self.tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        self.tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def spell(self, text: str) -> list[int]:
        return [5 + byte for byte in text.encode()]


def stream(decode: Any, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decode, prompt)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_no_piece_has_half_a_character() -> None:
    pieces = stream(Bytes().decode, [65, 66], list(TEXT.encode()))
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert max(len(piece) for piece in pieces) == 1  # and nothing is held back longer than its bytes take


def test_a_character_that_never_gets_complete_comes_at_the_end() -> None:
    pieces = stream(Bytes().decode, [], [*b"ab", *"😀".encode()[:2]])
    assert pieces == ["a", "b", "", "", "\ufffd"]


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_give_what_decoding_at_once_gives(seed: int) -> None:
    rng = random.Random(seed)
    ids: list[int] = []
    while len(ids) < 300:
        if rng.random() < 0.4:
            ids += rng.choice(TEXT).encode()
        else:
            ids += [rng.randrange(128, 256) for _ in range(rng.randrange(1, 60))]
    assert "".join(stream(Bytes().decode, list(b"prompt"), ids)) == Bytes().decode(ids)


def test_endless_bytes_that_are_no_text_are_given_out_and_stay_cheap() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return Bytes().decode(ids)

    pieces = stream(decode, [], [0xC3] * 2000)
    assert "".join(pieces) == "\ufffd" * 2000
    assert sum(map(bool, pieces)) > 1500
    assert longest < 100


def test_byte_fallback_and_leading_spaces() -> None:
    tokenizer = ByteFallback()
    prompt = [1, 2]
    ids = [2, *tokenizer.spell("😀é"), 1, 2, 3, *tokenizer.spell("日"), 4, 2]
    whole = tokenizer.decode(prompt + ids)
    pieces = stream(tokenizer.decode, prompt, ids)
    assert "".join(pieces) == whole[len(tokenizer.decode(prompt)) :]
    assert pieces[0] == " word"  # the space that only the beginning of a text loses
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("before", ["", "é", "中中", "中é中", "\ufffd"])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_prompt_of_tokens_may_end_inside_a_character(before: str, cut: int) -> None:
    tokenizer = ByteFallback()
    for decode, offset, word, text in ((tokenizer.decode, 5, 2, " word"), (Bytes().decode, 0, 65, "A")):
        spelled = [offset + byte for byte in (before + "中").encode()]
        at = len(spelled) - 3 + cut
        for first in ([], [word] * 6):
            assert "".join(stream(decode, first + spelled[:at], [*spelled[at:], word])) == "中" + text


def test_a_prompt_may_end_in_characters_that_are_spelled_in_bytes() -> None:
    tokenizer = ByteFallback()
    pieces = stream(tokenizer.decode, [2, *tokenizer.spell("🤖🤖")], [2, *tokenizer.spell("😀"), 1])
    assert "".join(pieces) == " word😀 a"


def test_a_replacement_character_of_the_prompt_is_not_sent_again() -> None:
    tokenizer = ByteFallback()
    assert "".join(stream(tokenizer.decode, [2, *tokenizer.spell("\ufffd")], [2])) == " word"
    assert "".join(stream(Bytes().decode, list("a\ufffd".encode()), [65])) == "A"
