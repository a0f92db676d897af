"""The random GGUF file of the benchmarks: the engine reads it, and its words are those of the other file."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fixtures import fill_region, write_checkpoint
from gguf_files import write_gguf
from gguf_vocabulary import gguf_metadata
from tokenizers import Tokenizer

from benchmarks import random_gguf
from benchmarks.shapes import SHAPES, Shape


def test_it_is_a_model_with_the_vocabulary_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_runtime.engine.checkpoint_files import read_config

    folder = write_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = write_gguf(folder, tmp_path / "words.gguf", **gguf_metadata(tokenizer, "gpt2", pre="gpt-2"))
    monkeypatch.setattr(random_gguf, "_POOL_BYTES", 10_007)
    monkeypatch.setitem(SHAPES, "tiny", Shape("llama", 3, 256, 512, 4, 2, 384))
    out = tmp_path / "out.gguf"
    assert random_gguf.main(["--shape", "tiny", "--vocabulary", str(vocabulary), "--out", str(out)]) == 0
    region = fill_region(out)
    try:
        config = read_config(region.file, region.wait_index())
        assert (config.num_layers, config.vocab_size) == (3, tokenizer.get_vocab_size())
        found = Tokenizer.from_buffer(region.file("tokenizer.json"))
        assert found.encode("Tokens flow").ids == tokenizer.encode("Tokens flow").ids
        kinds = {entry.dtype for entry in region.wait_index().tensors.values()}
        assert kinds == {"F32", "Q4_K", "Q6_K"}
    finally:
        region.close()
