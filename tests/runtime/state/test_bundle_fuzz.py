"""Bundles that anybody may have written: whatever the bytes, a StateError or something that can be used safely.

``FUZZ_INPUTS=100000 pytest tests/runtime/state/test_bundle_fuzz.py`` gives each parser that many inputs. What
was once found stands here as an ``example``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import struct
import zipfile
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from medusa_runtime.checkpoint.index import Shard, TensorEntry, WeightIndex
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError, StateError
from medusa_runtime.state.bundle.manifest import Artifact, Manifest
from medusa_runtime.state.graphs.blob_format import VERSION, decode_blueprints, encode_blueprints
from medusa_runtime.state.graphs.compiled import used_ranges
from medusa_runtime.state.kinds import KINDS
from medusa_runtime.state.kv_plan import Geometry, KvPlan, plan_kv_cache
from medusa_runtime.state.prompts import RecordedPrompts
from medusa_runtime.state.stage_times import StageTimes, WorkerRates
from medusa_runtime.state.trust import Trust
from medusa_runtime.state.weight_index import RecordedIndex
from medusa_vllm.compiled import cache as compile_cache

from .graphs.test_blueprint import WHOLE

INPUTS = int(os.environ.get("FUZZ_INPUTS", "0"))
_A_SEED = 100  # inputs; hypothesis takes milliseconds to make one of its own
_COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": not INPUTS,  # a test run is the same every time; a long one looks further
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
    "suppress_health_check": list(HealthCheck),
}
fuzzed = settings(max_examples=100, **_COMMON)
seeded = settings(max_examples=max(INPUTS // _A_SEED, 2), **_COMMON)
SEEDS = st.integers(0, 2**64)

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, "", "\n\x1b[2J", "../..", "F32", "AAAA", [], {}, [[]]]),
    st.floats(),
    st.text(max_size=12),
    st.lists(st.integers(-2, 2**65), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(-2, 9), max_size=2),
)
EDITS = st.lists(
    st.tuples(st.integers(0, 4095), st.sampled_from(["replace", "remove", "double", "wrap"]), LEAVES),
    min_size=1,
    max_size=4,
)
DAMAGE = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from(["set", "cut", "insert", "copy"]), st.binary(max_size=6)),
    min_size=1,
    max_size=4,
)


_LEAVES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**31,
    2**63,
    2**64,
    10**400,
    -(2**70),
    0.5,
    float("inf"),
    float("nan"),
    1e308,
]
_LEAVES += ["", "\n\x1b[2J", "../..", "F32", "AAAA", "\ud800", "x" * 99, [], {}, [[]], [0, 1], [-1, 2**65], {"": 0}]


def some_edits(random: Random) -> list[tuple[int, str, Any]]:
    operations, count = ("replace", "replace", "remove", "double", "wrap"), random.choice((1, 1, 2, 4))
    return [(random.randrange(4096), random.choice(operations), random.choice(_LEAVES)) for _ in range(count)]


def some_damage(random: Random) -> list[tuple[int, str, bytes]]:
    operations, count = ("set", "set", "cut", "insert", "copy"), random.choice((1, 1, 2, 4))
    return [
        (random.randrange(1 << 16), random.choice(operations), random.randbytes(random.randrange(7)))
        for _ in range(count)
    ]


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        found.append((value, key))
        places(inner, found)
    return found


def edited(document: Any, edits: list[tuple[int, str, Any]]) -> Any:
    document = [document]
    for number, operation, leaf in edits:
        found = places(document, [])
        container, key = found[number % len(found)]
        if operation == "replace" or container is document:
            container[key] = copy.deepcopy(leaf)
        elif operation == "remove":
            del container[key]
        elif operation == "wrap":
            container[key] = [container[key]]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        else:
            container[str(leaf)[:8]] = copy.deepcopy(container[key])
        if not document:
            return None
    return document[0]


def damaged(data: bytes, damage: list[tuple[int, str, bytes]]) -> bytes:
    body = bytearray(data)
    for position, operation, new in damage:
        at = position % (len(body) + 1)
        if operation == "set":
            body[at : at + len(new)] = new
        elif operation == "cut":
            del body[at:]
        elif operation == "insert":
            body[at:at] = new
        else:
            body[at:at] = body[: at // 2]
    return bytes(body)


MANIFEST = Manifest(
    (
        Artifact("weight-index", {"layout": "ab"}, "0" * 64, 3, b"abc"),
        Artifact("compile-cache", {"shape": "x", "isa": "y"}, "1" * 64, 1 << 20),
    ),
    ("config.json", "vocab.json"),
)
PUBLIC = "ed25519:O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik="
SIGNED = {
    **json.loads(MANIFEST.to_json()),
    "signature": {"key": PUBLIC, "value": "A" * 86 + "=="},
}


def use_manifest(text: bytes) -> None:
    manifest = Manifest.parse(text)
    for artifact in manifest.artifacts:
        assert len(artifact.sha256) == 64
        assert "/" not in artifact.sha256
        assert artifact.size >= 0
        assert all(value.isprintable() for value in artifact.key.values())
    for kind in KINDS.values():
        manifest.of_kind(kind.name)
    assert Trust(keys=(PUBLIC,)).signature_objection(manifest) is not None
    Manifest.parse(manifest.to_json())


INDEX = WeightIndex(
    [Shard("model.pt", 1000, 0, "etag"), Shard("b.safetensors", 500, 100, None, None, 4096)],
    {
        "a": TensorEntry(0, 64, 128, "F32", (4, 4)),
        "b": TensorEntry(0, 128, 128 + 4 * 14, "F32", (4, 3), (1, 5)),
        "c": TensorEntry(1, 0, 400, "F4", (2, 400)),
    },
    recorded=True,
)
RECORDED = RecordedIndex(INDEX, 1 << 20, {"crc32": array("Q", [1, 2])}, {"model.pt": (900, "00" * 32)})


def use_index(data: bytes) -> None:
    recorded = RecordedIndex.from_bytes(data)
    INDEX.reordered(recorded.index.order)
    recorded.checksums_for(INDEX)
    for shard in recorded.index.shards:
        known = recorded.archive(shard.name)
        if known is not None:
            assert 0 <= known.start <= known.size_bytes
            assert known.size_bytes - known.start <= 64 << 20
    for entry in recorded.index.tensors.values():
        assert 0 <= entry.start <= entry.stop <= recorded.index.shards[entry.shard].data_bytes
        reach = 0 if 0 in entry.shape else 1
        if entry.strides is not None:
            reach += sum((length - 1) * step for length, step in zip(entry.shape, entry.strides, strict=True) if reach)
            assert reach * 4 <= (entry.stop - entry.start) * 8
    recorded.to_bytes()


GEOMETRY = Geometry(16, 1024, (("blocks", 0), ("tokens", 16)), "float32", 128)
PLAN = KvPlan(16, 1024, 64, 128, 1 << 20, GEOMETRY.layout, "float32")
SETTINGS = Settings(max_concurrency=8)


def use_plan(data: bytes) -> None:
    found = KvPlan.from_bytes(data)
    assert found.margin_bytes >= PLAN.margin_bytes
    free = 300 << 20
    planned = plan_kv_cache(GEOMETRY, SETTINGS, free_bytes=free, activation_bytes=1 << 20, recorded=found)
    assert 0 < planned.cache_bytes <= free
    assert planned.max_model_len <= GEOMETRY.max_positions


TIMES = StageTimes(0.1, 0.0, 0.4, 0.02, 0.01, 1 << 20, float("inf"), 0.6, 3, {"engine/apply": 0.1})


def use_times(data: bytes) -> None:
    times = StageTimes.from_bytes(data)
    assert f"{times.starts} {times.ttft_s * 1e3:.0f}"
    times.predicted_ttft_s([WorkerRates(1e9, 1e9)])
    StageTimes.from_bytes(times.to_bytes())


RECORDED_PROMPTS = RecordedPrompts("0" * 64, "bfloat16", (2, 2, 4, 1, 8), 128, 0.5, (-1, 0, -1), tuple(range(12)))


def use_prompts(data: bytes) -> None:
    prompts = RecordedPrompts.from_bytes(data)
    for number, parent in enumerate(prompts.parents):
        assert -1 <= parent < number
        assert len(prompts.block(number)) == prompts.block_tokens
    assert len(prompts.parents) * prompts.block_s >= 0
    RecordedPrompts.from_bytes(prompts.to_bytes())


def use_graphs(data: bytes) -> None:
    """Code, so only from a place that is trusted; but damage there must not become a wrong address either."""
    blueprints = decode_blueprints(data)
    for graph in blueprints.graphs:
        for node in graph.nodes:
            for start, stop in blueprints.words(node):
                assert 0 <= start <= stop <= len(graph.blob)
    used_ranges(blueprints)
    for digest, code in blueprints.images.items():
        assert hashlib.sha256(code).hexdigest() == digest


GRAPHS = encode_blueprints(WHOLE)
_PROLOGUE = struct.Struct("<8s32sIQQQ")


def graphs(header: Any, body: bytes) -> bytes:
    """With a digest that is right, as whoever makes a wrong one would write it. Images follow the body."""
    text = json.dumps(header).encode()
    body, images = body[:_BODY_BYTES], body[_BODY_BYTES:]
    images = bytes(-(_PROLOGUE.size + len(text) + len(body)) % 16) + images
    rest = struct.pack("<IQQQ", VERSION, len(text), len(body), len(images)) + text + body
    return b"MEDUSAG\n" + hashlib.sha256(rest).digest() + rest + images


_HEADER_BYTES, _BODY_BYTES, _ = _PROLOGUE.unpack_from(GRAPHS)[3:]
_BODY_AT = _PROLOGUE.size + _HEADER_BYTES
HEADER = json.loads(GRAPHS[_PROLOGUE.size : _BODY_AT])
BODY = GRAPHS[_BODY_AT : _BODY_AT + _BODY_BYTES] + b"".join(WHOLE.images.values())  # of one image, so nothing between


def dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


def packed(document: Any) -> bytes:
    return zlib.compress(dumped(document), 1)


def document(data: bytes) -> Any:
    return json.loads(data)


JSON: dict[str, tuple[Callable[[], Any], Callable[[Any], bytes], Callable[[bytes], None]]] = {
    "manifest": (lambda: json.loads(json.dumps(SIGNED)), dumped, use_manifest),
    "weight-index": (lambda: document(zlib.decompress(RECORDED.to_bytes())), packed, use_index),
    "kv-plan": (lambda: document(PLAN.to_bytes()), dumped, use_plan),
    "prompts": (lambda: document(zlib.decompress(RECORDED_PROMPTS.to_bytes())), packed, use_prompts),
    "stage-times": (lambda: document(TIMES.to_bytes()), dumped, use_times),
    "cuda-graphs": (lambda: json.loads(json.dumps(HEADER)), lambda header: graphs(header, BODY), use_graphs),
}
BYTES: dict[str, tuple[bytes, Callable[[bytes], None]]] = {
    "manifest": (dumped(SIGNED), use_manifest),
    "weight-index": (RECORDED.to_bytes(), use_index),
    "kv-plan": (PLAN.to_bytes(), use_plan),
    "prompts": (RECORDED_PROMPTS.to_bytes(), use_prompts),
    "stage-times": (TIMES.to_bytes(), use_times),
    "cuda-graphs": (BODY, lambda body: use_graphs(graphs(HEADER, body))),
    "cuda-graphs-whole": (GRAPHS, use_graphs),
}


def hold(use: Callable[[bytes], None], data: bytes) -> None:
    """What may be raised; ConfigError is a plan's that has no room, which a start without it would say, too."""
    with contextlib.suppress(StateError, ConfigError):
        use(data)


@pytest.mark.parametrize("kind", JSON)
def test_a_document_with_other_values_is_refused_or_safe(kind: str) -> None:
    make, write, use = JSON[kind]
    use(write(make()))

    @fuzzed
    @given(EDITS)
    @example([(0, "replace", 10**400)])
    @example([(3, "replace", [[]])])
    def check(edits: list[tuple[int, str, Any]]) -> None:
        hold(use, write(edited(make(), edits)))

    @seeded
    @given(SEEDS)
    def check_many(seed: int) -> None:
        random = Random(seed)
        for _ in range(_A_SEED):
            hold(use, write(edited(make(), some_edits(random))))

    check()
    check_many()


@pytest.mark.parametrize("kind", BYTES)
def test_damaged_bytes_are_refused_or_safe(kind: str) -> None:
    data, use = BYTES[kind]
    use(data)

    @fuzzed
    @given(DAMAGE)
    @example([(0, "cut", b"")])
    def check(damage: list[tuple[int, str, bytes]]) -> None:
        hold(use, damaged(data, damage))

    @seeded
    @given(SEEDS)
    def check_many(seed: int) -> None:
        random = Random(seed)
        for _ in range(_A_SEED):
            hold(use, damaged(data, some_damage(random)))

    check()
    check_many()


DEEP = b"[" * 100_000


@pytest.mark.parametrize("use", [use_manifest, use_plan, use_times, use_graphs, use_index, use_prompts])
@pytest.mark.parametrize("text", [DEEP, b'{"schema":' + DEEP, b"1" * 5000, b"\xff\xfe", b"", b"null", b"[]", b"{}"])
def test_what_is_no_document_is_refused(use: Callable[[bytes], None], text: bytes) -> None:
    for data in (text, zlib.compress(text)):
        with pytest.raises(StateError):
            use(data)


def test_a_compressed_index_is_not_unpacked_without_end() -> None:
    engine = zlib.compressobj(9)
    bomb = b"".join(engine.compress(bytes(1 << 20)) for _ in range(200)) + engine.flush()
    assert len(bomb) < 1 << 20
    with pytest.raises(StateError, match="more than 67,108,864 bytes"):
        RecordedIndex.from_bytes(bomb)


def test_a_directory_that_is_the_whole_file_is_not_read() -> None:
    """Reading from where it begins to the file's end would take as much memory as the weights."""
    big = 100 << 30
    shard = Shard("model.pt", big, 0)
    for start in (0, big - (65 << 20), -1, big + 1):
        data = RecordedIndex(WeightIndex([shard], {}), 1, {}, {"model.pt": (start, "")}).to_bytes()
        with pytest.raises(StateError):
            RecordedIndex.from_bytes(data)


def test_a_kernels_parameter_does_not_begin_before_its_graphs_bytes() -> None:
    header = json.loads(json.dumps(HEADER))
    header["kernels"][0][2][0][0] = -8
    with pytest.raises(StateError, match="sizes and addresses"):
        decode_blueprints(graphs(header, BODY))


def test_a_compile_cache_leaves_its_folder_by_no_name(tmp_path: Path) -> None:
    made, blob = tmp_path / "made", tmp_path / "blob"
    made.mkdir()
    (made / "index.json").write_text("{}")
    whole = compile_cache.ARCHIVE.pack(made, blob).read_bytes()
    target = tmp_path / "out"

    def use(data: bytes) -> None:
        compile_cache.ARCHIVE.unpack(data, target)
        compile_cache.ARCHIVE.read(data, "index.json")

    use(whole)

    @fuzzed
    @given(DAMAGE)
    def check(damage: list[tuple[int, str, bytes]]) -> None:
        hold(use, damaged(whole, damage))

    @seeded
    @given(SEEDS)
    def check_many(seed: int) -> None:
        random = Random(seed)
        for _ in range(_A_SEED):
            hold(use, damaged(whole, some_damage(random)))

    check()
    check_many()
    for name in ("../up", "/abs", "model-1/../../up", "other/file", "model-1"):
        with zipfile.ZipFile(blob, "w") as archive:
            archive.writestr(name, b"x")
        with pytest.raises(StateError):
            compile_cache.ARCHIVE.unpack(blob.read_bytes(), target)
    assert {path.name for path in tmp_path.iterdir()} <= {"made", "blob", "out"}
