"""Tokenizers of the families we serve: token for token as transformers', chat markers as single tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from medusa_handler.model.chat_template import ChatTemplate
from medusa_runtime.engine.serving.tokenizer import Tokenizer
from medusa_runtime.errors import CorruptError, RequestError
from medusa_runtime.timeline import Timeline
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Parsed
from transformers import PreTrainedTokenizerFast

TEXTS = (
    "def handle(request):\n    return {'a': 1}  # 12345 it's",
    "Grüße aus Zürich — 你好，世界 🙂 👩‍👩‍👧",
    "  two  spaces\n\n\ttab ",
    "",
)
# Qwen2's own split (transformers, tokenization_qwen2).
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def qwen() -> Parsed:
    """Byte-level BPE, as Qwen's tokenizer.json has it, of a small vocabulary."""
    parsed = Parsed(models.BPE())
    parsed.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    parsed.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    parsed.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    parsed.train_from_iterator(TEXTS * 3, trainer)
    parsed.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return parsed


def llama2() -> Parsed:
    """A sentencepiece model as converted: spaces become "▁", and what has no piece becomes bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "e", "t", "u", "r", "n", "re"]
    pieces += ["▁re", "tu", "rn", "▁return"]
    merges = [("r", "e"), ("▁", "re"), ("t", "u"), ("r", "n")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    parsed = Parsed(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parsed.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    parsed.decoder = decoders.Sequence(steps)
    parsed.add_special_tokens(["<unk>", "<s>", "</s>"])
    return parsed


@pytest.mark.parametrize("make", [qwen, llama2])
def test_as_transformers_does(make: Callable[[], Parsed], tmp_path: Path) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer((tmp_path / "tokenizer.json").read_bytes(), Timeline.create("test"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_a_chat_s_markers_are_single_tokens() -> None:
    parsed = qwen()
    ours = Tokenizer(parsed.to_str().encode(), Timeline.create("test"))
    config = json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}).encode()
    template = ChatTemplate(lambda name: config if name == "tokenizer_config.json" else None)
    messages = [{"role": "user", "content": "hello"}]
    prompt = template.render(messages, {"add_generation_prompt": True})
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = ours.encode(prompt, add_special_tokens=False)
    start, end = parsed.token_to_id("<|im_start|>"), parsed.token_to_id("<|im_end|>")
    assert [number for number in ids if number in (start, end)] == [start, end, start]
    assert ours.decode(ids, skip_special_tokens=True) == "user\nhello\nassistant\n"


def test_without_a_tokenizer_json_the_message_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    ours = Tokenizer(None, Timeline.create("test"))
    with pytest.raises(RequestError, match=r"token ids.*tokenizer\.json"):
        ours.encode("hello", add_special_tokens=True)
    assert not caplog.records
    ours.wait(100)  # at the start: not only the first request shows it
    (record,) = caplog.records
    assert "has no tokenizer.json: only requests with token ids can be answered; " in record.getMessage()


def test_a_pointer_in_place_of_the_tokenizer_is_named() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    with pytest.raises(CorruptError, match=r"found a Git LFS pointer to one; run git lfs pull$"):
        Tokenizer(pointer, Timeline.create("test")).wait(100)


def test_a_tokenizer_of_another_model_is_named(caplog: pytest.LogCaptureFixture) -> None:
    parsed = qwen()
    tokens = parsed.get_vocab_size()
    ours = Tokenizer(parsed.to_str().encode(), Timeline.create("test"))
    ours.wait(tokens)
    assert not caplog.records
    ours.wait(tokens - 1)
    (record,) = caplog.records
    assert f"has {tokens} tokens, the model only {tokens - 1}" in record.getMessage()


def test_a_text_at_which_the_tokenizer_panics_ends_its_own_request() -> None:
    """A panic is no Exception: one ended the engine's process, with all requests under way."""
    parsed = Parsed(models.BPE({"a": 0, "b": 1}, []))
    parsed.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    ours = Tokenizer(parsed.to_str().encode(), Timeline.create("test"))
    for _ in range(2):
        with pytest.raises(RequestError, match="this model's tokenizer failed at this text"):
            ours.encode("a" * 40 + "b", add_special_tokens=False)
        assert ours.encode("ab", add_special_tokens=False) == [0, 1]


def test_a_text_with_words_that_have_no_token_ends_its_own_request() -> None:
    parsed = Parsed(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    ours = Tokenizer(parsed.to_str().encode(), Timeline.create("test"))
    assert ours.encode("a", True) == [0]
    with pytest.raises(RequestError, match=r"Missing \[UNK\] token"):
        ours.encode("b", True)
    with pytest.raises(RequestError, match=r"Missing \[UNK\] token"):
        ours.encode_pair("b" * 5000, "a")
