"""Safetensors headers, pickles, archives and weight indexes from files that nobody vouches for: CorruptError or a
result that is in bounds, never another error, a crash or a leak."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest
import torch
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_runtime.checkpoint.archive import read_archive
from medusa_runtime.checkpoint.header import DTYPE_BITS, PREFIX_BYTES, header_bytes, parse_header
from medusa_runtime.checkpoint.index import Shard, TensorEntry, WeightIndex
from medusa_runtime.checkpoint.tensor_pickle import read_pickle
from medusa_runtime.errors import CorruptError

LETTERS = "ab.1²٣\ud800é\x00"  # all of Unicode would take seconds to prepare
NUMBERS = st.one_of(
    st.integers(0, 64), st.integers(), st.booleans(), st.none(), st.floats(), st.text(LETTERS, max_size=4)
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(sorted(DTYPE_BITS)), st.text(LETTERS, max_size=5), NUMBERS),
        "shape": st.one_of(st.lists(NUMBERS, max_size=5), NUMBERS),
        "data_offsets": st.one_of(st.tuples(st.integers(0, 64), st.integers(0, 64)), st.lists(NUMBERS, max_size=3)),
    },
)
NAMES = st.one_of(st.sampled_from(["a", "layers.1.w", "__metadata__", "layers.²."]), st.text(LETTERS, max_size=20))
OPCODES = [
    bytes([code]) for code in b"(.0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~"
]
PIECES = st.one_of(
    st.sampled_from([*OPCODES, b"\x80\x02", b"\x85", b"\x86", b"\x87", b"\x93", b"\x94", b"K\x01", b"h\x00", b"q\x00"]),
    st.sampled_from(
        [
            b"ccollections\nOrderedDict\n",
            b"ctorch._utils\n_rebuild_tensor_v2\n",
            b"ctorch._tensor\n_rebuild_from_type_v2\n",
            b"ctorch\nFloatStorage\n",
            b"ctorch\nSize\n",
            b"X\x07\x00\x00\x00storage",
            b"X\x01\x00\x00\x00w",
            b")R",
        ]
    ),
    st.binary(max_size=8),
)


def _saved() -> bytes:
    buffer = io.BytesIO()
    weights = {"layers.0.w": torch.ones(3, 2), "half": torch.ones(4).half(), "turned": torch.ones(2, 3).t()}
    torch.save({"state_dict": weights, "epoch": 3, "lr": [0.1, None, "x"]}, buffer)
    return buffer.getvalue()


SAVED = _saved()
with zipfile.ZipFile(io.BytesIO(SAVED)) as _archive:
    PICKLE = _archive.read(next(name for name in _archive.namelist() if name.endswith("data.pkl")))


def short(error: CorruptError) -> None:
    assert len(str(error)) < 2000


def test_headers(safetensors_file: Any) -> None:
    whole = safetensors_file({"layers.0.w": ("F32", [2], b"12345678"), "b": ("BF16", [1, 1], b"12")})

    def check(data: bytes) -> None:
        try:
            start = header_bytes("m", data[:PREFIX_BYTES], len(data))
            entries = parse_header("m", data[PREFIX_BYTES:start], len(data) - start)
            index = WeightIndex.from_headers([Shard("m", len(data), start)], [entries])
        except CorruptError as error:
            short(error)
            return
        assert WeightIndex.from_json(index.to_json()) == index
        assert all(0 <= entry.start <= entry.stop <= len(data) - start for entry in index.tensors.values())

    def framed(entries: dict[str, Any]) -> bytes:
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + bytes(64)

    fuzz(st.one_of(st.dictionaries(NAMES, ENTRY, max_size=4).map(framed), st.binary(max_size=80)), check, [whole])


def test_pickles() -> None:
    def check(data: bytes) -> None:
        try:
            found = read_pickle("m", data)
        except CorruptError as error:
            short(error)
            return
        assert all(min((tensor.offset, *tensor.shape, *tensor.strides)) >= 0 for tensor in found.values())

    fuzz(st.lists(PIECES, max_size=60).map(b"".join), check, [PICKLE])


def test_archives() -> None:
    def check(data: bytes) -> None:
        def read(start: int, stop: int) -> bytes:
            assert 0 <= start <= stop
            return data[start:stop]

        try:
            found = read_archive("m", len(data), data[:520], read)
        except CorruptError as error:
            short(error)
            return
        assert all(0 <= entry.start <= entry.stop <= len(data) for entry in found.values())
        index = WeightIndex.from_headers([Shard("m", len(data), 0)], [found])
        assert WeightIndex.from_json(index.to_json()) == index

    def packed(records: dict[str, bytes]) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in records.items():
                archive.writestr(name or "x", content)
        return buffer.getvalue()

    names = st.sampled_from(["m/data.pkl", "m/data/0", "m/byteorder", "m/.storage_alignment", "m/data/1", "x"])
    contents = st.one_of(st.sampled_from([PICKLE, b"little", b"64"]), st.binary(max_size=40))
    fuzz(st.dictionaries(names, contents, max_size=5).map(packed), check, [SAVED, SAVED[-1200:]])


def test_weight_indexes() -> None:
    whole = WeightIndex(
        [Shard("m", 100, 8, "v")],
        {"a": TensorEntry(0, 0, 8, "F32", (2,)), "b": TensorEntry(0, 8, 16, "F16", (2, 2), (1, 2))},
    )

    def check(data: bytes) -> None:
        try:
            index = WeightIndex.from_json(data)
        except CorruptError:
            return
        for entry in index.tensors.values():
            assert 0 <= entry.start <= entry.stop <= index.shards[entry.shard].data_bytes

    values = st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=6), max_leaves=8)
    documents = st.fixed_dictionaries(
        {
            "format": st.just(1),
            "shards": st.lists(values, max_size=2),
            "tensors": st.dictionaries(NAMES, values, max_size=2),
        }
    )
    fuzz(documents.map(lambda document: json.dumps(document).encode()), check, [whole.to_json()])


def _nested(levels: int) -> bytes:
    """A tuple of twice the same tuple, and so on: its hash and its text take 2**levels steps."""
    return b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * levels


@pytest.mark.parametrize(
    "data",
    [
        _nested(60) + b".",
        b"\x80\x02}(" + _nested(60)[2:] + b"K\x01u.",  # as a key
        b"\x80\x02}(" + b")" + b"\x85" * 1_000_000 + b"K\x01u.",  # deeper than the stack
        _nested(60) + b"Q.",  # as a persistent id
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        + _nested(60)[2:]
        + b"NK\x01tQ.",  # as a storage's key
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__)s\x86b.",  # BUILD of a function
        b"\x80\x02}q\x00X\x0a\x00\x00\x00state_dicth\x00s.",  # a dict in itself
        b"\x80\x02]" + b"h\x00" * 10,
        b"\x80\x02(" * 1_000_000,
        b"\x80\x02" + b"]" * 3_000_000,
        b"\x80\x02ctorch\nSize\n](" + b"K\x01" * 1000 + b"e\x85R.",
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    ],
)
def test_pickles_that_attack(data: bytes) -> None:
    """Each of them ended the process, kept it busy for ever or left something behind, with Python's own unpickler."""
    from medusa_runtime.checkpoint import tensor_pickle

    with pytest.raises(CorruptError):
        read_pickle("m", data)
    assert tensor_pickle._tensor.__defaults__ is None
    assert not vars(tensor_pickle._tensor)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{" + b",".join(b'"%d":0' % (n // 2) for n in range(400_000)) + b"}", "names '.*' twice"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 4000 + b"]" + b',"data_offsets":[0,1]}}', "sizes of 0 or more"),
        (b'{"a":{"dtype":"U8","shape":[' + b",".join([b"99999999"] * 500_000) + b'],"data_offsets":[0,1]}}', "64 dim"),
        (b'{"' + b"n" * 1_000_000 + b'":0}', "expected dtype"),
        (b'{"a\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "the header is no JSON"),
        ('{"a":0}'.encode("utf-16"), "the header is no JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "the header is no JSON"),
        (b'{"__metadata__":[' + b"[]," * 2_600_000 + b"[]]}", "expected at most 5,000,000 values"),
        (b'{"a":{"dtype":"' + b"x" * 100_000 + b'","shape":[],"data_offsets":[0,0]}}', "unknown dtype"),
    ],
)
def test_headers_that_attack(text: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message) as caught:
        parse_header("m", text, 0)
    assert len(str(caught.value)) < 2000


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["layers.²", "layers.²3.w", "layers." + "9" * 5000 + ".w", "_" * 100_000, ".1" * 50_000]
)
def test_names_that_attack(name: str) -> None:
    """Numbers in names that are none in ASCII or too long, and patterns that would be tried for ever."""
    names = [name, "layers.1.w", "layers.٣.w", f"blocks.2.{name}.w"]
    index = WeightIndex([Shard("m", 100, 8)], {name: TensorEntry(0, 0, 1, "U8", (1,)) for name in names})
    assert set(index.order) == set(names)


def test_archives_that_attack() -> None:
    """Two records of one name, and tensors that lie behind the file's end."""

    def read(data: bytes) -> Any:
        return read_archive("m", len(data), data[:520], lambda start, stop: data[start:stop])

    with zipfile.ZipFile(io.BytesIO(SAVED)) as old:
        records = [(name, old.read(name)) for name in old.namelist()]
    for extra, message in (
        (("other/data.pkl", PICKLE), "'data.pkl' twice"),
        (("archive/.storage_alignment", b"9" * 65), "expected at most 64"),
    ):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as new:
            for name, content in [*(each for each in records if each[0] != extra[0]), extra]:
                new.writestr(name, content)
        with pytest.raises(CorruptError, match=message):
            read(buffer.getvalue())
    at = SAVED.rindex(b"PK\x01\x02", 0, SAVED.rindex(b"archive/data/1"))  # this record's place in the directory
    with pytest.raises(CorruptError, match=r"no record|ends at byte|truncated"):
        read(SAVED[: at + 42] + (len(SAVED) - 40).to_bytes(4, "little") + SAVED[at + 46 :])
