"""Fleets and traces by strangers: YAML bombs, counts without end, and whatever else a file may hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_cluster.simulation.fleet_file import parse, read_simulation_plan
from medusa_cluster.simulation.trace import gamma, read_csv, repeat, scale
from medusa_runtime.errors import ConfigError, MedusaError

FLEET = """
machines: [{name: m, count: 2, link: 16Gbit, memory: 188GB, device: a10}]
models: [{name: x, count: 2, profile: llama2-7b@a10, slo: {ttft: 7.5}}]
requests: {rate: 1, cv: [1, 8], seconds: 60}
"""
TRACE = "timestamp,input_tokens,output_tokens,model\n0.5,3,4,x\n2024-01-01T00:00:01,5,6,y\n"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LAUGHS + "name: *a11\n" + FLEET, "expected a name, found"),
        ("name: &a [*a]\n" + FLEET, "expected a name, found"),
        ("name: " + "[" * 900 + "]" * 900 + FLEET, "expected"),
        ("[" * 50_000 + "]" * 50_000, "expected"),
        ("- " * 50_000, "expected"),
        ("name: 2001-99-99\n" + FLEET, "month must be"),
        ("name: !!int\n" + FLEET, "expected YAML"),
        ("tick_s: " + "9" * 5000 + FLEET, "digits"),
        (FLEET.replace("seconds: 60", "seconds: .inf"), "found Infinity"),
        (FLEET.replace("cv: [1, 8]", "cv: 1e9"), "cv: expected"),
        (FLEET.replace("name: x, count: 2", "name: x, count: 1000000000"), "at most 1000000"),
        (FLEET.replace("profile: llama2-7b@a10", "profile: [a]"), "profile: expected one of"),
        ("name: !!python/object/apply:os.abort []\n" + FLEET, "could not determine a constructor"),
        ("#" * (5 << 20) + FLEET, "at most"),
    ],
    ids=range(14),
)
def test_a_hostile_fleet_gets_one_short_error(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=found) as error:
        read_simulation_plan(path)
    assert len(str(error.value)) < 1000


def test_requests_without_end_are_refused_before_they_are_made(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n0,1,1\n1e12,1,1\n")
    found = read_csv(path, ["m"])
    for make in (
        lambda: gamma([1e9], 1.0, 1e9, []),
        lambda: scale(found, 1e9),
        lambda: next(repeat(found[:1], 1e12)),
    ):
        with pytest.raises(ConfigError, match="at most 100000000 requests"):
            make()


def _is_short(error: MedusaError) -> None:
    assert len(str(error)) < 4000, str(error)[:200]


def test_fuzzed_fleets(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read_simulation_plan(path)
        except MedusaError as error:
            _is_short(error)

    words = st.sampled_from(
        [*FLEET.replace("{", " { ").replace("}", " } ").split(), "&a", "*a", "!!int", "<<:", "- ", "\n"]
    )
    drawn = st.lists(words, max_size=30).map(" ".join).map(str.encode)
    fuzz(drawn, read, [FLEET.encode()])


def test_fuzzed_fleets_as_objects() -> None:
    """The same behind YAML's parser, which is slow."""

    def read(data: bytes) -> None:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return
        try:
            parse(found)
        except MedusaError as error:
            _is_short(error)

    plan = {
        "machines": [{"name": "m", "link": "16Gbit", "memory": 1e9, "device": "a10"}],
        "models": [{"name": "x", "size": "1GB", "layers": 2, "times": {"prefill": 0.1, "decode": 1}}],
        "requests": {"rate": [1], "seconds": 1},
        "strategies": ["medusa"],
    }
    fuzz(st.binary(max_size=20), read, [json.dumps(plan).encode()])


def test_fuzzed_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            found = read_csv(path, ["x", "y"])
            assert found[0].at_s >= 0
        except MedusaError as error:
            _is_short(error)

    rows = st.lists(
        st.sampled_from([b"1e308", b"nan", b"-inf", b",", b"\n", b'"', b"x", b"9" * 40, b"\0", b"0001-01-01"])
    )
    fuzz(rows.map(lambda drawn: TRACE.encode() + b"".join(drawn)), read, [TRACE.encode()])
