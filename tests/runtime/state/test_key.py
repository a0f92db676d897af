"""What invalidates an artifact, and what does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from medusa_runtime.checkpoint.index import Shard, TensorEntry, WeightIndex
from medusa_runtime.config import Settings
from medusa_runtime.state import key
from medusa_runtime.state.key import FACTS, Facts, Subject
from medusa_runtime.state.kinds import KINDS, KV_PLAN, WEIGHT_INDEX

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "max_position_embeddings": 64, "dtype": "bfloat16"}


def index(**changes: object) -> WeightIndex:
    shards = [Shard("model.safetensors", 1064, 64, "v1", "/models/a/model.safetensors")]
    tensors = {"a": TensorEntry(0, 0, 600, "BF16", (30, 10)), "b": TensorEntry(0, 600, 1000, "BF16", (20, 10))}
    if "shape" in changes:
        tensors["b"] = TensorEntry(0, 600, 1000, "BF16", (10, 20))
    if "swapped" in changes:
        tensors = {"a": TensorEntry(0, 400, 1000, "BF16", (30, 10)), "b": TensorEntry(0, 0, 400, "BF16", (20, 10))}
    if "elsewhere" in changes:
        shards = [shards[0]._replace(version="v2", path=None)]
    return WeightIndex(shards, tensors)


def subject(found: WeightIndex | None = None, config: dict[str, object] | None = None, **settings: object) -> Subject:
    text = json.dumps(CONFIG if config is None else config).encode()
    return Subject(found or index(), {"config.json": text}, Settings(**settings))  # type: ignore[arg-type]


def invalid(changed: Subject) -> set[str]:
    """The kinds whose artifacts, made for the plain subject, are not valid for another."""
    here, there = Facts(changed), Facts(subject())
    return {name for name, kind in KINDS.items() if here.difference(there.key(kind.facts), kind.facts)}


COMPUTED = set(KINDS) - {"weight-index"}


def test_every_kind_depends_on_facts_that_exist() -> None:
    for kind in KINDS.values():
        assert kind.facts
        assert set(kind.facts) <= set(FACTS)


@pytest.mark.parametrize(
    "changed",
    [
        subject(index(elsewhere=True)),
        subject(config={**CONFIG, "_name_or_path": "/home/me/model", "transformers_version": "5.0"}),
        subject(model="/another/place", host="127.0.0.1", port=1, served_model_name="n", threads=1, connections=3),
        subject(max_concurrency=3, state="s3://bucket/state", max_model_len=64, dtype="bfloat16"),
    ],
)
def test_place_host_process_count_and_spelling_change_nothing(changed: Subject) -> None:
    assert invalid(changed) == set()


def test_home_and_working_folder_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Facts(subject()).key(tuple(FACTS))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Facts(subject()).key(tuple(FACTS)) == before


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (subject(dtype="float32"), COMPUTED),
        (subject(max_model_len=32), COMPUTED - {"stage-times"}),
        (subject(max_batched_tokens=64), {"kv-plan"}),
        (subject(engine="vllm"), COMPUTED),
        (subject(index(shape=True)), set(KINDS)),
        (subject(index(swapped=True)), {"weight-index"}),
        (subject(config={**CONFIG, "hidden_size": 16}), COMPUTED),
    ],
)
def test_what_an_artifact_depends_on_invalidates_it_and_nothing_else(changed: Subject, expected: set[str]) -> None:
    assert invalid(changed) == expected


@pytest.mark.parametrize("fact", ["torch", "isa", "gpu", "driver", "python"])
def test_another_machine_invalidates_what_was_compiled_or_measured_there(
    fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Facts(subject()).key(tuple(FACTS))
    monkeypatch.setitem(FACTS, fact, lambda _: "another")
    here = Facts(subject())
    found = {name for name, kind in KINDS.items() if here.difference(made, kind.facts)}
    assert found == {name for name, kind in KINDS.items() if fact in kind.facts}
    assert "weight-index" not in found
    assert ("prompts" in found) == ("prompt-kv" in found) == (fact == "gpu"), "GPUs do not use them"
    difference = here.difference(made, (fact,))
    assert difference
    assert fact in difference


def test_of_long_facts_only_what_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    common = " ".join(f"extension{number}" for number in range(20))
    monkeypatch.setitem(FACTS, "isa", lambda _: f"{common} avx2")
    expected = "it was made for another isa: only there avx512f, only here avx2"
    assert Facts(subject()).difference({"isa": f"{common} avx512f"}, ("isa",)) == expected
    assert Facts(subject()).difference({"isa": "arm"}, ("isa",)) is not None


def test_a_key_that_lacks_a_fact_is_not_valid() -> None:
    facts = Facts(subject())
    made = facts.key(KV_PLAN.facts)
    del made["isa"]
    assert facts.difference(made, KV_PLAN.facts) == "its key does not say for which isa it was made"
    assert facts.difference({"more": "x", **facts.key(WEIGHT_INDEX.facts)}, WEIGHT_INDEX.facts) is None


@pytest.mark.parametrize("files", [{}, {"config.json": b"no JSON"}, {"config.json": b"[]"}])
def test_a_config_that_cannot_be_read_is_for_others_to_complain_about(files: dict[str, bytes]) -> None:
    assert Facts(replace(subject(), files=files))["dtype"] == "the weights' own"


def test_versions_are_those_that_import_finds() -> None:
    from importlib.metadata import version

    assert key.package_version("torch") == version("torch")
    assert key.package_version("flask") == version("flask")
    assert key.package_version("no_such_package", "torch") == version("torch")
    assert key.package_version("no_such_package") == "not installed"


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        return path

    return write


def test_the_isa_is_the_vector_extensions_alone(cpuinfo: Callable[[str], Path]) -> None:
    flags = "flags\t\t: fpu sse4_1 avx2 avx512f amx_tile hypervisor md_clear\n"
    assert key.isa(cpuinfo(f"processor : 0\n{flags}\nprocessor : 1\n")).split()[1:] == [
        "amx_tile", "avx2", "avx512f", "sse4_1",
    ]  # fmt: skip


def test_finding_facts_imports_no_torch() -> None:
    script = (
        "import sys\nfrom medusa_runtime.state.key import *\nfrom medusa_runtime.config import Settings\n"
        "from medusa_runtime.checkpoint.index import WeightIndex\n"
        "facts = Facts(Subject(WeightIndex([], {}), {}, Settings()))\n"
        "facts.key(tuple(FACTS))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=240)


def test_gpus_are_named_without_touching_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "_NVIDIA", tmp_path)
    monkeypatch.setattr(key, "_DEVICES", tmp_path)
    found = key._gpu_names.__wrapped__
    assert (found(), key.driver_version.__wrapped__()) == ("none", "none")
    (tmp_path / "nvidia0").touch()
    assert found() == "of unknown name"
    for number, name in enumerate(("NVIDIA H200", "NVIDIA L4")):
        folder = tmp_path / "gpus" / f"0000:{number}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 16\n")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC version:\n"
    )
    assert (found(), key.driver_version.__wrapped__()) == ("NVIDIA H200, NVIDIA L4", "570.86.15")
    assert Facts(subject(device="cpu"))["gpu"] == "none"
