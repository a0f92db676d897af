"""The tokenizer of a GGUF file: token for token the one from which it was made, and refused where it cannot be."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from gguf_vocabulary import CONTROL, NORMAL, USER_DEFINED, gguf_metadata
from medusa_handler.model.chat_template import ChatTemplate
from medusa_runtime.checkpoint.gguf import tokenizer as tokenizer_module
from medusa_runtime.checkpoint.gguf.packed_strings import PackedStrings
from medusa_runtime.checkpoint.gguf.tokenizer import tokenizer_files
from medusa_runtime.engine.serving.detokenizer import Detokenizer
from medusa_runtime.engine.serving.tokenizer import parse
from medusa_runtime.errors import ConfigError, CorruptError, MedusaError, ModelError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "",
    " ",
    "Hello, world! It's 12345678 o'clock, they'LL say.",
    "def handle(request):\n    return {'a': 1}  # done\n\n\n",
    "Grüße aus Zürich — 你好，世界 🙂 👩‍👩‍👧 नमस्ते ಠ_ಠ",
    "  two  spaces\n\n\ttab \r\n end   ",
    "NUL \0 and \x7f, \u2028, \u00a0, e\u0301 and \u00e9",
    "<|begin|>system<|tool|> say<|end_of_turn|>\n",
    "[PAD450] <0x0A> </s> ▁",
)
MARKERS = ("<|begin|>", "<|end_of_turn|>", "<|eot_id|>")


def bytes_of(*, normalizer: Any = None) -> Tokenizer:
    """Byte-level BPE as Llama 3 has it, of a small vocabulary, with control tokens and one that is text."""
    parsed = Tokenizer(models.BPE(ignore_merges=True))
    parsed.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
    parsed.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    parsed.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    parsed.train_from_iterator(TEXTS[:6] * 3, trainer)
    parsed.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    parsed.add_tokens([AddedToken("<|tool|>", special=False, normalized=False)])
    return parsed


def characters_of(*, adds_space: bool) -> Tokenizer:
    """SentencePiece's BPE as transformers converts it, with a byte for each character without a token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = "▁ H e l o w r d a n t s ▁t he ▁H el lo ▁w or ld ▁the ▁▁ ▁▁▁▁ ▁Hel ▁Hello ▁wor ▁world an and"
    pieces += words.split()
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (piece[:at], piece[at:])
        for piece in pieces[259:]
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    parsed = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", "▁")
    parsed.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape]) if adds_space else escape
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    parsed.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    parsed.add_special_tokens(["<unk>", "<s>", "</s>"])
    parsed.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    parsed.add_tokens([AddedToken("<|tool|>", special=False, normalized=False)])
    return parsed


@pytest.fixture(params=["packed", "lists"], autouse=True)
def _strings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each tokenizer of packed strings, as the compiled library leaves them, and of lists."""

    def files_of_packed(name: str, metadata: dict[str, Any]) -> dict[str, bytes]:
        return tokenizer_module.tokenizer_files(name, {key: packed(value) for key, value in metadata.items()})

    if request.param == "packed":
        monkeypatch.setitem(globals(), "tokenizer_files", files_of_packed)


def packed(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(each, str) and "\0" not in each for each in value):
        return PackedStrings("".join(f"{each}\0" for each in value).encode())
    return value


def of_bytes(**more: Any) -> dict[str, Any]:
    return gguf_metadata(bytes_of(), "gpt2", **{"pre": "llama-bpe", **more})


def of_scores(*, adds_space: bool, **more: Any) -> dict[str, Any]:
    """Return the metadata of ``characters_of`` with scores, as files of the kind ``llama`` have them."""
    metadata = gguf_metadata(characters_of(adds_space=adds_space), "llama", add_space_prefix=adds_space, **more)
    del metadata["tokenizer.ggml.merges"]
    types = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.scores"] = [-float(at) if kind == NORMAL else 0.0 for at, kind in enumerate(types)]
    return metadata


def files_of(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: json.loads(data) for name, data in tokenizer_files("m.gguf", metadata).items()}


def parsed_of(metadata: dict[str, Any]) -> Any:
    return parse(tokenizer_files("m.gguf", metadata)["tokenizer.json"])


def assert_same(found: Any, expected: Tokenizer) -> None:
    """Check ids, texts with and without special tokens, and streamed texts."""
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == ids, text
        for skip in (False, True):
            assert found.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)
        stream = Detokenizer(lambda some: str(found.decode(some, skip_special_tokens=False)), [])
        pieces = "".join([*map(stream.push, ids), stream.flush()])
        assert pieces == expected.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("size", [None, 460])
def test_bytes_are_the_original_s(size: int | None) -> None:
    expected = bytes_of()
    found = parsed_of(gguf_metadata(expected, "gpt2", size, pre="llama-bpe", add_bos_token=False))
    assert found.get_vocab() == expected.get_vocab()  # without those that fill the vocabulary up
    assert_same(found, expected)


@pytest.mark.parametrize("adds_space", [True, False])
@pytest.mark.parametrize("scores", [True, False])
def test_characters_are_the_original_s(adds_space: bool, scores: bool) -> None:
    expected = characters_of(adds_space=adds_space)
    if scores:
        metadata = of_scores(adds_space=adds_space)
    else:
        metadata = gguf_metadata(expected, "gemma4", add_space_prefix=adds_space)
    assert_same(parsed_of(metadata), expected)


def test_a_text_is_composed_where_the_original_composes_it() -> None:
    expected = bytes_of(normalizer=normalizers.NFC())
    found = parsed_of(gguf_metadata(expected, "gpt2", pre="qwen2"))
    assert found.encode("e\u0301").ids == expected.encode("e\u0301").ids == found.encode("\u00e9").ids


def test_merges_that_are_no_two_words_stay_what_they_are() -> None:
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": ["a", "b", " ", " a", " ab", "a ", "#version", "#versiona"],
        "tokenizer.ggml.merges": ["a  ", "  a", " a b", "#version a"],
    }
    model = files_of(metadata)["tokenizer.json"]["model"]
    assert model["merges"] == [["a", " "], [" ", "a"], [" a", "b"], ["#version", "a"]]
    parsed_of(metadata)
    plain = {"tokenizer.ggml.tokens": ["a", "#version", "#versiona"], "tokenizer.ggml.merges": ["#version a"]}
    assert files_of(metadata | plain)["tokenizer.json"]["model"]["merges"] == [["#version", "a"]]


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({"bos_token_id": 380}, [380, 1]),  # as llama.cpp does for this pre-tokenizer
        ({"bos_token_id": 380, "add_bos_token": False}, [1]),
        ({"bos_token_id": 0xFFFFFFFF}, [1]),
        ({"eos_token_id": 381, "add_eos_token": True, "pre": "qwen2"}, [1, 381]),
    ],
)
def test_a_text_begins_and_ends_as_the_file_says(more: dict[str, Any], ids: list[int]) -> None:
    metadata = of_bytes(**more)
    letter = metadata["tokenizer.ggml.tokens"][1]
    found = parsed_of(metadata)
    assert found.encode(letter).ids == ids
    assert found.encode(letter, letter).ids == [*ids, *ids]
    assert found.encode(letter, add_special_tokens=False).ids == [1]
    config = files_of(metadata)["tokenizer_config.json"]
    assert (config["add_bos_token"], config["add_eos_token"]) == (ids[0] != 1, ids[-1] != 1)


def test_which_tokens_end_a_text() -> None:
    metadata = of_bytes(eos_token_id=381)
    names = metadata["tokenizer.ggml.tokens"]
    assert files_of(metadata)["generation_config.json"] == {"eos_token_id": [381, names.index("<|eot_id|>")]}
    metadata = of_bytes(pre="gpt-2", eot_token_id=380, eom_token_id=381)
    types = metadata["tokenizer.ggml.token_type"]
    types[382] = NORMAL  # a mistake of some files
    found = files_of(metadata)
    assert found["generation_config.json"] == {"eos_token_id": [380, 381, 382]}
    assert {"id": 382, "special": True}.items() <= found["tokenizer.json"]["added_tokens"][2].items()


@pytest.mark.parametrize(
    ("texts", "kinds", "ends"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], CONTROL, [1, 2]),
        (["<|end|>", "<|calls|>", "<|flush|>"], CONTROL, [1, 2]),
        (["<|end|>", "<|return|>", "<|user|>"], CONTROL, [0, 1]),
        (["</s>", "<eos>", "[EOT]"], CONTROL, [0, 1, 2]),
        (["</s>", "<eos>", "[EOT]"], NORMAL, []),
        (["</s>", "<|tool_response>", "b"], CONTROL, [1]),
    ],
)
def test_a_token_ends_a_text_where_it_has_that_meaning(texts: list[str], kinds: int, ends: list[int]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [kinds] * 3,
        "tokenizer.ggml.merges": [],
    }
    assert files_of(metadata).get("generation_config.json", {"eos_token_id": []}) == {"eos_token_id": ends}


def test_a_user_s_text_makes_control_tokens_only_of_their_names() -> None:
    metadata = of_scores(adds_space=True)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens += ["<", "/", "s", ">", "</", "s>"][: 2 + 4]
    tokens[-4] = "/s"  # "s" is there already
    types += [NORMAL] * 6
    metadata["tokenizer.ggml.scores"] += [1.0] * 6
    merges = files_of(metadata)["tokenizer.json"]["model"]["merges"]
    assert "s >" in merges
    assert "</ s>" not in merges
    parsed_of(metadata)
    for token in ("#version 1", "#version", " 1"):  # they cannot be told apart in a line
        tokens.append(token)
        types.append(NORMAL)
        metadata["tokenizer.ggml.scores"].append(2.0)
    merges = files_of(metadata)["tokenizer.json"]["model"]["merges"]
    assert ["#version", " 1"] in merges
    parsed_of(metadata)


def test_runs_of_spaces_are_tokens_of_their_own_where_the_file_has_them() -> None:
    """Gemma's are, which converters write with real spaces."""
    metadata = of_scores(adds_space=False)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    at = tokens.index("▁▁")
    tokens[at], types[at] = "  ", USER_DEFINED
    found = parsed_of(metadata)
    ids = found.encode("Hello  world", add_special_tokens=False).ids
    assert at in ids
    assert found.decode(ids) == "Hello  world"
    assert found.decode([at]) == "  "


def test_an_old_file_s_special_tokens_are_found_by_name() -> None:
    metadata = of_scores(adds_space=True)
    assert parsed_of(metadata).encode("H").tokens == ["<s>", "▁H"]
    found = files_of(metadata)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert config.items() <= found["tokenizer_config.json"].items()
    assert found["tokenizer.json"]["model"]["unk_token"] == "<unk>"
    without = {"tokenizer.ggml.bos_token_id": 0xFFFFFFFF}
    assert parsed_of(metadata | without).encode("H").tokens == ["▁H"]
    metadata["tokenizer.ggml.token_type"][1] = NORMAL
    assert parsed_of(metadata).encode("H").tokens == ["▁H"]


def test_phi3_swallows_what_is_behind_its_markers() -> None:
    metadata = of_scores(adds_space=True)
    metadata["general.architecture"] = "phi3"
    found = parsed_of(metadata)
    assert found.encode("<|begin|> \nHello", add_special_tokens=False).tokens == ["<|begin|> \n", "▁Hello"]
    assert found.encode("<s> Hello", add_special_tokens=False).tokens == ["<s>", "▁", "▁Hello"]


def test_chat_templates_reach_the_chat() -> None:
    metadata = of_bytes(bos_token_id=380, eos_token_id=381) | {"tokenizer.chat_template": "{{ bos_token }}plain"}
    for named, expected in ((False, "<|begin|>plain"), (True, "tool <|end_of_turn|>")):
        if named:
            metadata["tokenizer.chat_templates"] = ["tool_use", "absent"]
            metadata["tokenizer.chat_template.tool_use"] = "tool {{ eos_token }}"
        template = ChatTemplate(tokenizer_files("m.gguf", metadata).get)
        tools = {"tools": [{"type": "function"}]}
        assert template.render([{"role": "user", "content": "a"}], tools) == expected
        assert template.render([{"role": "user", "content": "a"}], {}) == "<|begin|>plain"


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_without_a_tokenizer_there_are_no_files(model: str | None) -> None:
    assert tokenizer_files("m.gguf", {"tokenizer.ggml.model": model} if model else {}) == {}


def refused(metadata: dict[str, Any], kind: type[MedusaError], message: str) -> None:
    with pytest.raises(kind, match=f"^m.gguf: .*{message}") as caught:
        tokenizer_files("m.gguf", metadata)
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("model", "rwkv", ConfigError, "'rwkv', which is not supported .*put the model's tokenizer.json beside"),
        ("model", 3, CorruptError, "expected tokenizer.ggml.model to be a string, found a number"),
        ("pre", None, ConfigError, "expected tokenizer.ggml.pre to name .*, found no such key; .*beside the file"),
        ("pre", "default", ConfigError, "found 'default'; convert the model with a newer llama.cpp"),
        ("pre", "unheard-of", ConfigError, "'unheard-of', .*beside the file. Supported are .*qwen2"),
        ("pre", ["qwen2"], CorruptError, "expected tokenizer.ggml.pre to be a string, found an array"),
        ("tokens", None, CorruptError, "expected tokenizer.ggml.tokens to be an array of tokens, found none"),
        ("tokens", [], CorruptError, "expected tokenizer.ggml.tokens to be an array of tokens, found none"),
        ("tokens", "a", CorruptError, "expected tokenizer.ggml.tokens to be an array, found a string"),
        ("tokens", ["a", 1], CorruptError, "an array of strings, found 1 at index 1"),
        ("tokens", ["a", "b", "a"], CorruptError, "expected .* to be tokens that all differ, found 'a' twice"),
        ("token_type", [1], CorruptError, "expected .*token_type to be 384 numbers, one for each token, found 1"),
        ("token_type", [7] * 384, CorruptError, "expected .*token_type to be types from 0 to 6, found 7"),
        ("token_type", [True] * 384, CorruptError, "an array of numbers, found true or false at index 0"),
        ("token_type", [1.0] * 384, CorruptError, "an array of numbers, found 1.0 at index 0"),
        ("merges", None, CorruptError, "expected tokenizer.ggml.merges to be an array of pairs of tokens"),
        ("merges", [["a", "b"]], CorruptError, "an array of strings, found an array at index 0"),
        ("bos_token_id", 384, CorruptError, "bos_token_id to be the id of one of 384 tokens, found 384"),
        ("bos_token_id", True, CorruptError, "bos_token_id to be the id of one of 384 tokens, found true or false"),
        ("eot_token_id", -2, CorruptError, "eot_token_id to be the id of one of 384 tokens, found -2"),
        ("add_bos_token", 1, CorruptError, "add_bos_token to be true or false, found a number"),
        ("add_eos_token", True, CorruptError, "eos_token_id to be a token's id, since add_eos_token is true"),
    ],
)
def test_what_is_refused(key: str, value: Any, kind: type[MedusaError], message: str) -> None:
    metadata = of_bytes() | {f"tokenizer.ggml.{key}": value}
    refused({key: value for key, value in metadata.items() if value is not None}, kind, message)


@pytest.mark.parametrize("merge", ["! !", "a unheard-of", "ab", ""])
def test_merges_that_name_no_tokens_are_refused_by_their_reader(merge: str) -> None:
    files = tokenizer_files("m.gguf", of_bytes() | {"tokenizer.ggml.merges": [merge]})
    with pytest.raises(CorruptError, match=r"^tokenizer.json: .* out of vocabulary"):
        parse(files["tokenizer.json"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.chat_template", 1, "expected tokenizer.chat_template to be a string"),
        ("tokenizer.chat_templates", [1], "expected tokenizer.chat_templates to be an array of strings"),
        ("tokenizer.chat_templates", ["a"] * 101, "expected tokenizer.chat_templates to be at most 100 names"),
    ],
)
def test_which_templates_are_refused(key: str, value: Any, message: str) -> None:
    refused(of_bytes() | {key: value}, CorruptError, message)


def test_which_scores_are_refused() -> None:
    metadata = of_scores(adds_space=True)
    count = len(metadata["tokenizer.ggml.tokens"])
    for scores, message in (
        (None, f"scores to be {count} numbers, one for each token, found no such key"),
        ([0.0], f"scores to be {count} numbers, one for each token, found 1"),
        ([float("nan")] * count, "scores to be finite numbers"),
        (["0"] * count, "an array of numbers, found a string at index 0"),
    ):
        wrong = metadata | {"tokenizer.ggml.scores": scores}
        refused({key: value for key, value in wrong.items() if value is not None}, CorruptError, message)


def test_work_is_bounded() -> None:
    plain = {"tokenizer.ggml.model": "llama"}
    for tokens in (["a" * 1001], [f"{number:0900}" for number in range(100)], ["a" * (at + 1) for at in range(700)]):
        scored = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * len(tokens)}
        refused(plain | scored, ModelError, "expected tokens of at most 1000 characters, .*, found longer ones")
    tokens = [str(number) for number in range(50_001)]
    special = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [CONTROL] * len(tokens)}
    refused(plain | special, ModelError, "expected at most 50000 special tokens .*, found 50001 of 238895")
    special = {"tokenizer.ggml.tokens": ["a" * 1_000_001], "tokenizer.ggml.token_type": [CONTROL]}
    refused(plain | special, ModelError, "of 1000000 characters together, found 1 of 1000001")


@pytest.mark.parametrize("make", [of_bytes, lambda: of_scores(adds_space=True)])
def test_whatever_a_file_says_is_refused_or_parsed(make: Callable[[], dict[str, Any]]) -> None:
    random, original = Random(7), make()
    strange = (
        None,
        True,
        -1,
        0,
        3,
        2.5,
        float("inf"),
        "",
        "a",
        " ",
        "a b",
        "\0",
        "▁",
        [],
        ["a"],
        [1],
        [[]],
        {},
        1 << 40,
    )
    parsed = 0
    for _ in range(100):
        metadata = dict(original)
        for key in random.choices(list(metadata), k=random.choice((1, 1, 2))):
            value = metadata[key]
            if isinstance(value, list) and value and random.random() < 0.8:
                value = list(value)
                for _ in range(random.choice((1, 1, 3))):
                    like = [one for one in strange if type(one) is type(value[0])]
                    value[random.randrange(len(value))] = random.choice([*like, *like, *value[:50], *strange[:4]])
                metadata[key] = value
            else:
                metadata[key] = random.choice(strange)
        with contextlib.suppress(MedusaError):  # any other error fails
            files = tokenizer_files("m.gguf", metadata)
            if files:
                parse(files["tokenizer.json"]).encode("Hello, <|eot_id|> world 12  é")
                parsed += 1
    assert parsed > 10
