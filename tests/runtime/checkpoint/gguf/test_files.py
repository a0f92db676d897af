"""GGUF files: what an index has of them, and one clear error for each that is broken, hostile or not supported."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from medusa_runtime.checkpoint.gguf import header, packed_strings
from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.checkpoint.gguf.header import GgufHeader, read_header
from medusa_runtime.checkpoint.gguf.packed_strings import PackedStrings
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.checkpoint.reader import Checkpoint, open_checkpoint
from medusa_runtime.errors import ConfigError, CorruptError, MedusaError, ModelError, ObjectNotFoundError

KEYS: dict[str, Any] = {
    "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 32, "llama.feed_forward_length": 64,
    "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def write(file: Path, keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    """Write a file with these keys of metadata, and tensors of zeros: a shape, or a shape and a type."""
    found = KEYS | (keys or {})
    writer = GGUFWriter(file, found.pop("general.architecture", "llama"))
    for key, value in found.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for name, shape in ({"token_embd.weight": (8, 32)} | (tensors or {})).items():
        if len(shape) == 2 and isinstance(shape[1], str):
            shape, kind = shape
            block = BLOCKS[kind]
            octets = numpy.zeros((*shape[:-1], shape[-1] // block.values * block.size_bytes), dtype=numpy.uint8)
            writer.add_tensor(name, octets, raw_dtype=GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, numpy.zeros(shape, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def parsed(data: bytes, first: int = 64) -> GgufHeader:
    """The header of a file that is read in small pieces."""
    return read_header("m.gguf", len(data), data[:first], lambda start, stop: data[start : min(stop, start + 50)])


def config(checkpoint: Checkpoint) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(checkpoint.files["config.json"])
    return found


@pytest.fixture(params=["compiled", "python"], autouse=True)
def _strings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read strings by each of both ways."""
    if request.param == "python":
        monkeypatch.setattr(header, "gather_strings", lambda: None)
    else:
        assert packed_strings.gather_strings() is not None


def test_all_kinds_of_values(tmp_path: Path) -> None:
    keys = {
        "a.text": "ä\n", "a.flag": True, "a.number": 7, "a.float": 0.5,
        "a.texts": ["x", "", "日本"], "a.nuls": ["x", "\0y"],
        "a.flags": [True, False], "a.numbers": [1, -2, 1 << 30], "a.floats": [0.25, -1.0],
    }  # fmt: skip
    found = parsed(write(tmp_path / "m.gguf", keys).read_bytes()).metadata
    assert {key: list(found[key]) if isinstance(found[key], PackedStrings) else found[key] for key in keys} == keys
    assert [type(found[key][0]) for key in ("a.texts", "a.flags", "a.numbers", "a.floats")] == [str, bool, int, float]


@pytest.mark.parametrize("kind", BLOCKS)
def test_tensors_in_blocks(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": ((3, 512), kind), "output_norm.weight": (32,)})
    index = open_checkpoint(str(tmp_path / "m.gguf")).index
    entry = index.tensors["model.layers.0.mlp.up_proj.weight"]
    assert (entry.dtype, entry.shape) == (kind, (3, 512))
    assert entry.stop - entry.start == 3 * 512 // BLOCKS[kind].values * BLOCKS[kind].size_bytes
    assert index.tensors["model.norm.weight"].dtype == "F32"
    assert WeightIndex.from_json(index.to_json()) == index
    short = index.to_json().replace(b"[3,512]", b"[3,768]")
    with pytest.raises(CorruptError, match="bytes that its shards do not have"):
        WeightIndex.from_json(short)


def test_the_data_lies_where_the_index_says(tmp_path: Path) -> None:
    for alignment in (32, 8, 4096):
        file = tmp_path / f"{alignment}.gguf"
        writer = GGUFWriter(file, "llama")
        writer.add_custom_alignment(alignment)
        for key, value in KEYS.items():
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        values = {f"blk.{at}.attn_norm.weight": numpy.full(at + 1, at, dtype=numpy.float32) for at in range(9)}
        for name, value in {"token_embd.weight": numpy.zeros((8, 32), dtype=numpy.float32), **values}.items():
            writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        index, data = open_checkpoint(str(file)).index, file.read_bytes()
        for at in range(9):
            entry = index.tensors[f"model.layers.{at}.input_layernorm.weight"]
            start = index.shards[0].data_start
            assert data[start + entry.start : start + entry.stop] == values[f"blk.{at}.attn_norm.weight"].tobytes()


def test_a_file_that_is_cut_anywhere(tmp_path: Path) -> None:
    keys = {"a.texts": ["one", "two"], "a.numbers": [1, 2, 3]}
    data = write(tmp_path / "m.gguf", keys, {"blk.0.attn_norm.weight": (32,)}).read_bytes()
    whole = parsed(data)
    assert len(whole.tensors) == 2
    for length in [*range(whole.data_start), *range(whole.data_start, len(data), 37)]:
        with pytest.raises(CorruptError, match=r"^m.gguf: "):
            parsed(data[:length])


def test_a_file_that_is_broken_anywhere(tmp_path: Path) -> None:
    keys = {"a.texts": ["one", "two"], "a.numbers": [1, 2, 3]}
    data = write(tmp_path / "m.gguf", keys, {"blk.0.ffn_up.weight": ((2, 64), "Q8_0")}).read_bytes()
    stop, read = parsed(data).data_start, 0
    for place in range(stop):
        for octet in (0, 1, 0x7F, 0x80, 0xFF, data[place] ^ 1):
            broken = data[:place] + bytes([octet]) + data[place + 1 :]
            with contextlib.suppress(MedusaError):  # any other error fails
                read_header("m.gguf", len(broken), broken, lambda start, stop: b"")
                read += 1
    assert 0 < read < 5 * stop


def _with_count(data: bytes, at: int, count: int) -> bytes:
    return data[:at] + struct.pack("<Q", count) + data[at + 8 :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"<!doctype html>" + data, "expected a GGUF file, found one that starts with b'<!doctyp'"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "expected version 2 or 3 of GGUF in little-endian"),
        (lambda data: _with_count(data, 8, 1 << 60), "expected at most 500000 tensors"),
        (lambda data: _with_count(data, 16, 1 << 60), "expected at most 10000 keys"),
        (lambda data: data.replace(b"a.second", b"a.thefir"), "has the key 'a.thefir' twice"),
        (lambda data: data.replace(b"one", b"\xff\xfe\xfd"), "'a.texts': expected UTF-8"),
        (
            lambda data: data.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_norm.weighs"),
            "has two tensors of one name",
        ),
        (
            lambda data: data.replace(struct.pack("<IQQ", 8, 2, 3), struct.pack("<IQQ", 8, 1 << 40, 3)),
            "expected at most 5,000,000 values of metadata, found more at 'a.texts'",
        ),
    ],
)
def test_what_a_broken_header_is_refused_with(change: Any, said: str, tmp_path: Path) -> None:
    keys = {"a.thefir": 1, "a.second": 2, "a.texts": ["one", "two"]}
    tensors = {"blk.0.attn_norm.weight": (32,), "blk.0.attn_norm.weighs": (32,)}
    data = write(tmp_path / "m.gguf", keys, tensors).read_bytes()
    assert len(parsed(data).tensors) == 3
    assert change(data) != data
    with pytest.raises(CorruptError, match=f"^m.gguf: .*{said}" if said[0] != "'" else said):
        parsed(change(data))


@pytest.mark.parametrize(
    ("shape", "said"),
    [((1 << 40, 0), "expected sizes above 0, found"), ((600_000, 1), "weights of up to 500000 experts, found")],
)
def test_a_small_file_of_many_experts(shape: tuple[int, int], said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {"llama.expert_count": 2}, {"blk.0.ffn_up_exps.weight": (600_000, 1)})
    file.write_bytes(file.read_bytes().replace(struct.pack("<QQ", 1, 600_000), struct.pack("<QQ", *shape[::-1])))
    with pytest.raises(CorruptError, match=said):
        open_checkpoint(str(file))


def test_types_that_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", numpy.zeros((2, 66), numpy.uint8), raw_dtype=GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"blk.0.ffn_up.weight.* stored as IQ2_XXS, .* one of F32, F16, BF16, Q4"):
        open_checkpoint(str(file))


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        (
            {"general.architecture": "bert"},
            ModelError,
            "'bert' from GGUF files; expected one of llama, qwen2",
        ),
        (
            {"llama.block_count": None},
            CorruptError,
            "expected llama.block_count to be a positive number, found nothing",
        ),
        ({"llama.attention.head_count": "two"}, CorruptError, "llama.attention.head_count .* found 'two'"),
        ({"llama.attention.head_count": [2, 4]}, CorruptError, "the same number for each layer, found \\[2, 4\\]"),
        ({"llama.rope.dimension_count": 8}, ModelError, "to be 16, the size of a head, found 8"),
        ({"llama.rope.scaling.type": "longrope"}, ModelError, "none, linear or yarn, found 'longrope'"),
        ({"llama.rope.scaling.type": "linear"}, CorruptError, "expected llama.rope.scaling.factor to be a number"),
        (
            {"split.count": 3, "split.no": 0},
            ConfigError,
            "one of 3 parts: expected a name .* with -00001-of-00003",
        ),
        ({"split.count": 1 << 30}, CorruptError, "at most 1000 parts"),
    ],
)
def test_metadata_that_is_missing_or_wrong(
    keys: dict[str, Any], error: type[MedusaError], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"^m.gguf: .*{said}"):
        open_checkpoint(str(write(tmp_path / "m.gguf", keys)))


def test_a_split_file(tmp_path: Path) -> None:
    split = {"split.count": 2}
    first = write(tmp_path / "m-00001-of-00002.gguf", split | {"split.no": 0})
    with pytest.raises(ObjectNotFoundError, match=r"m-00002-of-00002.gguf"):
        open_checkpoint(str(first))
    second = tmp_path / "m-00002-of-00002.gguf"
    write(second, split | {"split.no": 1}, {"blk.0.attn_norm.weight": (32,)})
    with pytest.raises(CorruptError, match=r"embed_tokens.weight' is in m-00001.* and in m-00002.*, expected in one"):
        open_checkpoint(str(first))
    with pytest.raises(ConfigError, match=r"this is not the first of 2 parts: expected m-00001-of-00002.gguf"):
        open_checkpoint(str(second))


def test_the_config_of_a_file(tmp_path: Path) -> None:
    """Numbers for each layer that are all the same, a head of its own, and what is not in the file."""
    keys = {"llama.attention.head_count_kv": [1, 1], "tokenizer.ggml.eos_token_id": 2}
    found = config(open_checkpoint(str(write(tmp_path / "m.gguf", keys, {"output.weight": (8, 32)}))))
    assert (found["num_key_value_heads"], found["eos_token_id"], found["head_dim"]) == (1, 2, 16)
    assert found["tie_word_embeddings"] is False
    assert found["dtype"] == "float32"
    quantized = {"blk.0.ffn_up.weight": ((64, 32), "Q8_0")}
    assert config(open_checkpoint(str(write(tmp_path / "q.gguf", tensors=quantized))))["dtype"] == "bfloat16"


def test_a_folder_names_the_file_in_it(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    with pytest.raises(ObjectNotFoundError, match=f"to use a GGUF file, give its own address: {tmp_path}/m.gguf"):
        open_checkpoint(str(tmp_path))


def test_a_tokenizer_beside_the_file_replaces_its_own(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"tokenizer.ggml.model": "of-another-world", "tokenizer.ggml.tokens": ["a", "b"]})
    with pytest.raises(MedusaError, match="of-another-world"):
        open_checkpoint(str(tmp_path / "m.gguf"))
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("not JSON")
    (tmp_path / "tokenizer.json").write_text('{"its": "own"}')
    files = open_checkpoint(str(tmp_path / "m.gguf")).files
    assert files["tokenizer.json"] == b'{"its": "own"}'
    assert json.loads(files["config.json"])["model_type"] == "llama"
    assert set(files) == {"config.json", "tokenizer.json", "generation_config.json"}
