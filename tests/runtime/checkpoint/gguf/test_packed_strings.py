"""Compiled code splits tokens and writes vocabularies as Python does."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count, islice
from random import Random

import pytest
from medusa_runtime.checkpoint.gguf.packed_strings import PackedStrings, split_tokens

_ALPHABET = ["a", "b", '"', "\\", "\n", "\x01", "\x7f", "é", "▁", "日", "🙂"]


def pack(strings: list[str]) -> PackedStrings:
    return PackedStrings("".join(f"{each}\0" for each in strings).encode())


def random_tokens(seed: int) -> list[str]:
    random = Random(seed)
    return list(dict.fromkeys("".join(random.choices(_ALPHABET, k=random.randint(1, 5))) for _ in range(1000)))


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_split_in_all_ways_that_give_tokens(seed: int) -> None:
    tokens = random_tokens(seed)
    chosen = Random(seed).sample(range(len(tokens)), len(tokens) * 2 // 3)
    known = {tokens[at] for at in chosen}
    expected = [
        f"{token[:cut]} {token[cut:]}"
        for token in map(tokens.__getitem__, chosen)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    assert len(expected) > 100
    found = split_tokens(pack(tokens), chosen)
    assert found is not None
    assert list(found) == expected
    text = found.pairs_as_json()
    assert text is not None
    assert json.loads(text) == expected


def test_python_splits_tokens_whose_hashes_are_chosen_to_be_equal() -> None:
    """FNV-1a, and the place among 256 that 70 tokens have."""

    def slot(text: str) -> int:
        value = 0xCBF29CE484222325
        for octet in text.encode():
            value = (value ^ octet) * 0x100000001B3 % (1 << 64)
        return (value ^ value >> 32) * 0x9E3779B1 % (1 << 32) & 255

    tokens = list(islice((text for at in count() if slot(text := str(at)) == 7), 70))
    assert split_tokens(pack(tokens), range(60)) is not None
    assert split_tokens(pack(tokens), range(70)) is None


def test_python_splits_tokens_with_very_many_splits() -> None:
    tokens = ["a" * length for length in range(1, 300)]
    assert split_tokens(pack(tokens), range(299)) is None
    assert split_tokens(pack([]), []) is not None


@pytest.mark.parametrize("seed", range(3))
def test_numbered_strings(seed: int) -> None:
    tokens = [*random_tokens(seed), *(chr(number) for number in range(1, 0x20) if number not in (1, 10))]
    left_out = bytes(Random(seed).choices((0, 1, 255), (8, 1, 1), k=len(tokens)))
    text = pack(tokens).numbered_as_json(left_out)
    assert text is not None
    assert list(json.loads(text).items()) == [(token, at) for at, token in enumerate(tokens) if not left_out[at]]
    for strings, out, expected in (([], b"", b"{}"), (["\x01" * 9], b"\0", b'{"' + rb"\u0001" * 9 + b'":0}')):
        assert pack(strings).numbered_as_json(out) == expected


def test_pairs_have_one_space_each() -> None:
    assert pack(["a b", '" \\']).pairs_as_json() == rb'["a b","\" \\"]'
    assert pack(["a b", "#version c"]).pairs_as_json() == b'[["a","b"],["#version","c"]]'
    assert pack([]).pairs_as_json() == b"[]"
    for odd in (["ab"], ["a b c"], ["a  b"], ["a b", ""], ["", "a b"], ["a b c", "d"], ["a", "b c d"]):
        assert pack(odd).pairs_as_json() is None, odd


_LIMITED = """
import resource
from medusa_runtime.checkpoint.gguf.packed_strings import PackedStrings, split_tokens
from medusa_runtime.process_limits import used_bytes

strings = PackedStrings(b"\\1" * 10_000_000 + b"\\0")
limit = used_bytes(resource.RLIMIT_DATA) + (16 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
print(strings.numbered_as_json(b"\\0"), split_tokens(strings, [0]))
"""


def test_what_is_written_counts_as_this_process_s_memory() -> None:
    """Which a node's agent limits, because anybody may have written the file."""
    found = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, check=False)
    assert found.stdout == "None None\n", found.stderr
