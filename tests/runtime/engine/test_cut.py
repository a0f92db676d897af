"""Inputs that are cut, beside what transformers makes of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from encoder_checkpoint import WORDS, write_tokenizer
from medusa_runtime.engine.serving.cut import Cut
from medusa_runtime.engine.serving.tokenizer import Tokenizer
from medusa_runtime.timeline import Timeline

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_and_pairs_are_cut_as_by_transformers(tmp_path: Path, side: str) -> None:
    write_tokenizer(tmp_path)
    own = Tokenizer((tmp_path / "tokenizer.json").read_bytes(), Timeline.create("test"))
    theirs: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), truncation_side=side
    )
    draw = random.Random(side)
    for _ in range(300):
        texts = [" ".join(draw.choices(WORDS[4:], k=draw.randint(1, 9))) for _ in range(draw.randint(1, 2))]
        most = draw.randint(4, 16)
        ids, segments = own.encode_cut(texts, Cut(most, left=side == "left"), add_special_tokens=True)
        wanted = theirs(*texts, truncation=True, max_length=most, return_token_type_ids=True)
        assert (ids, segments) == (wanted["input_ids"], wanted["token_type_ids"]), (texts, most)


def test_each_text_of_a_pair_has_a_limit(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    own = Tokenizer((tmp_path / "tokenizer.json").read_bytes(), Timeline.create("test"))
    cut = Cut(most_first=1, most_second=2)
    assert own.encode_cut(["a cat sat", "the mat was"], cut, True) == ([2, 4, 3, 7, 8, 3], [0, 0, 0, 1, 1, 1])
    assert own.encode_cut(["a cat sat", "the mat"], cut._replace(most=5), True)[0] == [2, 4, 3, 7, 3]
    assert own.encode_cut(["a cat sat"], Cut(2), False) == ([4, 5], [0, 0])
    assert own.encode_cut(["a cat sat"], Cut(1), True)[0] == [2], "there is no room for the special tokens"
