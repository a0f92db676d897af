"""Headers, right and wrong, and the index that is made of them."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.checkpoint.header import DTYPE_BITS, MOST_TENSORS, parse_header
from medusa_runtime.checkpoint.index import Shard, WeightIndex
from medusa_runtime.checkpoint.reader import _THREADS, open_checkpoint
from medusa_runtime.errors import CorruptError, ForbiddenError, ObjectNotFoundError, UnreachableError
from medusa_runtime.storage.local import LocalStore

Make = Callable[..., bytes]
F32 = ("F32", [2], b"12345678")


def header(entries: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(start: int, stop: int, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def index_of(folder: Path, body: bytes) -> WeightIndex:
    (folder / "model.safetensors").write_bytes(body)
    return open_checkpoint(str(folder)).index


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"abc", "expected a safetensors file, found 3 bytes"),
        ((10**9).to_bytes(8, "little") + b"x" * 50, "expected at most 100000000"),
        (b"<!doctype html><html></html>", "found a web page"),
        (header({"a": tensor(0, 4)})[:-5], "truncated: expected a header of"),
        (header({"a": tensor(0, 4)}, b"123"), "truncated: tensor 'a' ends at byte 4 of the data, but there are only 3"),
        (header({"a": tensor(0, 4)}, b"12345"), "cover 4 bytes, but 5 follow"),
        (header({"a": tensor(0, 4), "b": tensor(2, 6)}, b"123456"), "'a' and 'b' overlap at byte 2, expected 4"),
        (header({"a": tensor(0, 4), "b": tensor(6, 8)}, b"12345678"), "gap of 2 bytes in front of tensor 'b'"),
        (header({"a": tensor(2, 4)}, b"1234"), "gap of 2 bytes in front of tensor 'a'"),
        (header({"a": tensor(0, 4, "F32", [2])}, b"1234"), r"F32 of shape \[2\] takes 64 bits, .* hold 32"),
        (header({"a": tensor(0, 4, "F32", [1 << 62] * 40)}, b"1234"), r"takes \d+… bits, .* hold 32"),
        (header({"a": tensor(0, 4, "F13")}, b"1234"), "unknown dtype 'F13', expected one of BOOL"),
        (header({"a": tensor(0, 4, ["F32"])}, b"1234"), "unknown dtype"),
        (header({"a": tensor(0, 4, "U8", [-4])}, b"1234"), "expected sizes of 0 or more"),
        (header({"a": tensor(0, 4, "U8", [True, 4])}, b"1234"), "expected sizes of 0 or more"),
        (header({"a": tensor(4, 0, "U8", [4])}, b"1234"), "rising offsets"),
        (header({"a": {"dtype": "U8"}}, b""), "expected dtype, shape and two data_offsets"),
        (header(b"<html>"), "the header is no JSON"),
        (header(b"[]"), "expected a JSON object as header, found list"),
        (header(b"[" * 100_000), "the header is no JSON"),
        (header(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}'), "names 'a' twice"),
    ],
)
def test_a_bad_header_gives_one_clear_error(tmp_path: Path, body: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message) as caught:
        index_of(tmp_path, body)
    assert "model.safetensors" in str(caught.value)


def test_every_dtype_that_the_reference_writes(tmp_path: Path, safetensors_file: Make) -> None:
    entries = {name.lower(): (name, [16], b"x" * (bits * 2)) for name, bits in DTYPE_BITS.items()}
    index = index_of(tmp_path, safetensors_file(entries))
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "np") as reference:  # the reference accepts each of the names too
        assert set(reference.keys()) == set(index.tensors)
    assert {index.tensors[name].dtype for name in index.tensors} == set(DTYPE_BITS)


def test_offsets_agree_with_the_reference(tmp_path: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    arrays = {f"layers.{n}.w": numpy.arange(n * 3, dtype=numpy.float32).reshape(n, 3) for n in range(5)}
    save_file(arrays, tmp_path / "model.safetensors", {"format": "np"})
    index = open_checkpoint(str(tmp_path)).index
    data = (tmp_path / "model.safetensors").read_bytes()
    for name, array in arrays.items():
        entry, shard = index.tensors[name], index.shards[0]
        assert entry.shape == array.shape
        assert data[shard.data_start + entry.start : shard.data_start + entry.stop] == array.tobytes()


@pytest.mark.parametrize(
    "names",
    [
        ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(12)), "model.norm.weight",
         "lm_head.weight"],
        ["transformer.word_embeddings.weight", *(f"transformer.h.{n}.mlp.dense.bias" for n in range(11)),
         "transformer.ln_f.weight", "lm_head.weight"],
        ["model.decoder.embed_positions.weight", *(f"model.decoder.layers.{n}.fc1.weight" for n in range(11)),
         "model.decoder.final_layer_norm.weight"],
        ["model.language_model.embed_tokens.weight", "model.language_model.layers.0.self_attn.q_norm.weight",
         "model.language_model.layers.0.post_attention_layernorm.weight", "model.language_model.norm.weight"],
    ],
)  # fmt: skip
def test_execution_order_is_read_from_the_names(tmp_path: Path, safetensors_file: Make, names: list[str]) -> None:
    index = index_of(tmp_path, safetensors_file(dict.fromkeys(sorted(names, reverse=True), F32)))
    if len(names) == 4:  # inside a layer the file's order stays
        names[1], names[2] = names[2], names[1]
        names[1:3] = sorted(names[1:3], reverse=True)
    assert list(index.order) == names


def test_a_name_that_tells_nothing_stays_beside_its_neighbour(tmp_path: Path, safetensors_file: Make) -> None:
    names = ["layers.1.a", "mystery", "layers.0.a", "embed.weight"]
    index = index_of(tmp_path, safetensors_file(dict.fromkeys(names, F32)))
    assert list(index.order) == ["embed.weight", "layers.0.a", "layers.1.a", "mystery"]


def shards(folder: Path, make: Make, **files: list[str]) -> dict[str, str]:
    for name, tensors in files.items():
        (folder / f"{name}.safetensors").write_bytes(make(dict.fromkeys(tensors, F32)))
    return {tensor: f"{name}.safetensors" for name, tensors in files.items() for tensor in tensors}


def opened(folder: Path, weight_map: Any) -> WeightIndex:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return open_checkpoint(str(folder)).index


def test_sharded(tmp_path: Path, safetensors_file: Make) -> None:
    index = opened(
        tmp_path, shards(tmp_path, safetensors_file, one=["layers.0.a", "lm_head.weight"], two=["embed.weight"])
    )
    assert [shard.name for shard in index.shards] == ["one.safetensors", "two.safetensors"]
    assert index.order == ("embed.weight", "layers.0.a", "lm_head.weight")
    again = WeightIndex.from_json(index.to_json())
    assert again == index
    assert again.order == index.order
    assert again.shards == index.shards


def test_shards_that_contradict(tmp_path: Path, safetensors_file: Make) -> None:
    whole = shards(tmp_path, safetensors_file, one=["a", "b"], two=["c"])
    with pytest.raises(CorruptError, match=r"tensor 'd' is in one\.safetensors, found it in none"):
        opened(tmp_path, whole | {"d": "one.safetensors"})
    with pytest.raises(CorruptError, match=r"tensor 'c' is in one\.safetensors, found it in two\.safetensors"):
        opened(tmp_path, whole | {"c": "one.safetensors", "x": "two.safetensors"})
    with pytest.raises(ObjectNotFoundError, match=r"names the shard three\.safetensors, which is missing"):
        opened(tmp_path, whole | {"z": "three.safetensors"})
    shards(tmp_path, safetensors_file, two=["b"])
    with pytest.raises(CorruptError, match=r"'b' is in one\.safetensors and in two\.safetensors"):
        opened(tmp_path, whole)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors"]
)
def test_shards_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(CorruptError, match="leads out of the checkpoint's folder"):
        opened(tmp_path, {"a": name})


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 3}, {"a": "pytorch_model.bin"}])
def test_a_weight_map_that_is_none(tmp_path: Path, weight_map: Any) -> None:
    with pytest.raises(CorruptError, match=r"model\.safetensors\.index\.json"):
        opened(tmp_path, weight_map)


def test_one_file_by_its_name(tmp_path: Path, safetensors_file: Make) -> None:
    shards(tmp_path, safetensors_file, other=["a"])
    assert open_checkpoint(f"file://{tmp_path}/other.safetensors").index.order == ("a",)
    with pytest.raises(ObjectNotFoundError, match="found none of them"):
        open_checkpoint(str(tmp_path))


def test_a_small_file_that_is_there_and_cannot_be_read_is_no_missing_one(
    tmp_path: Path, safetensors_file: Make
) -> None:
    shards(tmp_path, safetensors_file, model=["a"])
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ForbiddenError, match=r"config\.json: expected a regular file, found a folder"):
        open_checkpoint(str(tmp_path))


class UnreachableStore(LocalStore):
    """A store whose machine no packet reaches, once so many files are asked for as are read at a time."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.asked: list[str] = []
        self._all = threading.Barrier(_THREADS)

    def read(self, key: str, start: int, stop: int, version: str | None = None) -> Any:
        self.asked.append(key)
        self._all.wait(60)
        raise UnreachableError(f"{key}: cannot be reached")


def test_a_store_that_cannot_be_reached_is_asked_once_for_files_at_a_time(tmp_path: Path) -> None:
    store = UnreachableStore(str(tmp_path))
    with pytest.raises(UnreachableError, match="cannot be reached"):
        open_checkpoint("https://store.example/m", store=store)
    assert len(store.asked) == _THREADS


def test_a_bundle_from_another_time() -> None:
    with pytest.raises(CorruptError, match="format 1"):
        WeightIndex.from_json(b'{"format": 99}')
    with pytest.raises(CorruptError, match="expected a weight index"):
        WeightIndex.from_json(b"[]")


def test_a_folder_of_diffusers(tmp_path: Path, safetensors_file: Make) -> None:
    shards(tmp_path, safetensors_file, diffusion_pytorch_model=["a"])
    assert open_checkpoint(str(tmp_path)).index.order == ("a",)
    (tmp_path / "diffusion_pytorch_model.safetensors").rename(tmp_path / "one.safetensors")
    named = {"weight_map": {"a": "one.safetensors"}}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(named))
    assert [shard.name for shard in open_checkpoint(str(tmp_path)).index.shards] == ["one.safetensors"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": ' + "[" * 100_000, 'expected JSON with a weight_map, found \'{"weight_map": '),
        ('{"weight_map": {"a": "\\ud800.safetensors"}}', "half of a character"),
        ('{"weight_map": {"a": "a\\nERROR: all is lost.safetensors"}}', "a character that cannot be shown"),
        (json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(10_001)}}), "at most 10000 shards"),
        ('{"weight_map": {"": [' + "[]," * 520_000 + "[]]}}", "at most 1,000,000 values"),
    ],
)
def test_an_index_json_that_attacks(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptError, match=message):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("shards", "entry"),
    [
        ([["m", 100, 8]], [1, 0, 8, "F32", [2]]),
        ([["m", 100, 8]], [0, 90, 98, "F32", [2]]),
        ([["m", 100, 8]], [0, 8, 0, "F32", [2]]),
        ([["m", 100, 8]], [0, 0, 8, "F32", [3]]),
        ([["m", 100, 8]], [0, 0, 8, "F32", [2], [9]]),
        ([["m", 100, 8]], [0, 0, 8, "F32", [True, 2]]),
        ([["m", 100, 8]], [0, -8, 0, "F32", [2]]),
        ([["m", 8, 100]], [0, 0, 0, "F32", [0]]),
        ([[3, 100, 8]], [0, 0, 8, "F32", [2]]),
        ([["m", 100, 8, 0]], [0, 0, 8, "F32", [2]]),
        ([["m", 100, 8, None, []]], [0, 0, 8, "F32", [2]]),
    ],
)
def test_an_index_that_names_bytes_out_of_bounds(shards: Any, entry: Any) -> None:
    text = json.dumps({"format": 1, "shards": shards, "tensors": {"a": entry}})
    with pytest.raises(CorruptError, match="bytes that its shards do not have"):
        WeightIndex.from_json(text)


def test_a_folder_without_a_usual_name_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"; to use a file of another name, give its own address$"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "net.pt").touch()
    with pytest.raises(ObjectNotFoundError, match=f"give its own address: {tmp_path}/net.pt$"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ObjectNotFoundError, match=r"such as model-00001-of-00002\.safetensors, but not model\.saf"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "q4.gguf").touch()
    with pytest.raises(ObjectNotFoundError, match=f"to use a GGUF file, give its own address: {tmp_path}/q4.gguf$"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("below", ["snapshots/0123abc", "0_Transformer", "unet", "1"])
def test_a_folder_of_folders_says_which_has_the_weights(tmp_path: Path, below: str) -> None:
    (tmp_path / below).mkdir(parents=True)
    (tmp_path / below / "model.safetensors.index.json").touch()
    with pytest.raises(ObjectNotFoundError, match=rf"in a folder of it: give its address, {tmp_path}/{below}$"):
        open_checkpoint(str(tmp_path))


def test_a_folder_for_other_code_than_transformers_is_named(tmp_path: Path) -> None:
    for name in ("params.json", "consolidated.safetensors", "tekken.json"):
        (tmp_path / name).touch()
    with pytest.raises(ObjectNotFoundError, match=r"Mistral's or Meta's own code: expected those for transformers$"):
        open_checkpoint(str(tmp_path))


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/4d7a")
    with pytest.raises(
        ObjectNotFoundError, match=r"model\.safetensors is a link to \.\./\.\./blobs/4d7a, which is missing"
    ):
        open_checkpoint(str(tmp_path))


def _header(count: int, offsets: str = "data_offsets") -> bytes:
    names = (f'"t{number}":{{"dtype":"U8","shape":[0],"{offsets}":[0,0]}}' for number in range(count))
    return f"{{{','.join(names)}}}".encode()


def test_a_header_of_too_many_tensors_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(CorruptError, match=f"expected at most {MOST_TENSORS} tensors, found {MOST_TENSORS + 1}"):
        parse_header("x", _header(MOST_TENSORS + 1), 0)


@pytest.mark.parametrize("offsets", ["data_offsets", "data_offset\\u0073"])
def test_no_checkpoint_has_too_many_tensors(monkeypatch: pytest.MonkeyPatch, offsets: str) -> None:
    for module in ("header", "index"):
        monkeypatch.setattr(f"medusa_runtime.checkpoint.{module}.MOST_TENSORS", 9)
    entries = parse_header("x", _header(9, offsets), 0)
    shards = [Shard("one", 8, 8), Shard("two", 8, 8)]
    with pytest.raises(CorruptError, match="x: expected at most 9 tensors, found 10"):
        parse_header("x", _header(10, offsets), 0)
    assert len(WeightIndex.from_headers(shards, [entries, {}]).tensors) == 9
    with pytest.raises(CorruptError, match="the checkpoint: expected at most 9 tensors, found 18"):
        WeightIndex.from_headers(shards, [entries, {f"other.{name}": entry for name, entry in entries.items()}])


def test_no_garbage_is_collected_while_a_header_is_read() -> None:
    """A collector that looks through a hundred thousand new tuples again and again takes longer than all the rest."""
    collections: list[str] = []
    text = _header(20_000)
    index = WeightIndex.from_headers([Shard("one", 8, 8)], [parse_header("x", text, 0)])
    recorded = index.to_json()
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        entries = parse_header("x", text, 0)
        WeightIndex.from_headers([Shard("one", 8, 8)], [entries])
        WeightIndex.from_json(recorded)
    finally:
        gc.callbacks.pop()
    assert (len(collections) < 9, gc.isenabled()) == (True, True), "one between two calls, and none during them"
