"""What captures leave in a bundle, and what becomes of a KV plan that was measured on the CPU."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from medusa_runtime import registry
from medusa_runtime.config import Settings
from medusa_runtime.errors import EngineError
from medusa_runtime.state import key
from medusa_runtime.state.kv_plan import KvPlan
from medusa_runtime.state.materialize import ArtifactResult, Materialization

HERE = __name__
ON_CPU, ON_GPU = KvPlan(16, 1024, 4, 64, 1), KvPlan(16, 1024, 4, 64, 2, graph_bytes=3)


class _Profile(NamedTuple):
    order: list[str]
    plan: KvPlan | None


def profile(region: Any, settings: Settings) -> _Profile:
    return _Profile(list(region.wait_index().order), ON_CPU)


def graphs_and_plan(model: str, settings: Settings, folder: Path) -> Path:
    (folder / "kv-plan").write_bytes(ON_GPU.to_bytes())
    (folder / "second.dump").write_bytes(b"no kind is named so")
    (folder / "cuda-graphs").write_bytes(b"graphs")
    return folder / "cuda-graphs"


def failing(model: str, settings: Settings, folder: Path) -> None:
    raise EngineError("the GPU is too small")


def code_and_no_graphs(model: str, settings: Settings, folder: Path) -> None:
    (folder / "kv-plan").write_bytes(ON_GPU.to_bytes())
    raise EngineError("two captures differ")


def no_graphs(model: str, settings: Settings, folder: Path) -> None:
    return None


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abcd")
    return tmp_path


@pytest.fixture(params=["graphs_and_plan", "no_graphs"])
def capture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    monkeypatch.setattr("medusa_runtime.state.materialize.verify", lambda file, settings: None)
    monkeypatch.setattr(key, "_gpu_names", lambda: "H200")
    kind = registry.EngineKind(
        "toy", "", "", (), profile=f"{HERE}:profile", captures={"cuda-graphs": f"{HERE}:{request.param}"}
    )
    registry.register(kind)
    return str(request.param)


def test_a_gpus_plan_is_the_one_that_is_kept(capture: str, checkpoint: Path) -> None:
    made: list[ArtifactResult] = []
    with Materialization(Settings(model=str(checkpoint), engine="toy", device="cuda"), None, made.append) as making:
        making.prepare()
        making.commit()
    found = {one.kind: one.left_out for one in made}
    if capture == "no_graphs":
        assert "cuda-graphs" not in found
        assert found["kv-plan"] == "nothing was captured on the GPU, where it is measured; each start computes one"
        return
    assert found == {"weight-index": None, "cuda-graphs": None, "kv-plan": None}
    kept = [path.read_bytes() for path in (checkpoint / ".medusa").rglob("*") if path.is_file()]
    assert ON_GPU.to_bytes() in kept
    assert ON_CPU.to_bytes() not in kept
    assert b"no kind is named so" not in kept


@pytest.mark.parametrize("capture", ["code_and_no_graphs"], indirect=True)
def test_what_a_capture_has_made_before_it_failed_is_kept(capture: str, checkpoint: Path) -> None:
    made: list[ArtifactResult] = []
    with Materialization(Settings(model=str(checkpoint), engine="toy", device="cuda"), None, made.append) as making:
        making.prepare()
        manifest = making.commit()
    assert {one.kind: one.left_out for one in made}["cuda-graphs"] == "two captures differ"
    assert sorted(one.kind for one in manifest.artifacts) == ["kv-plan", "weight-index"]


def engine_that_captures(how: str, name: str = "toy") -> None:
    registry.register(
        registry.EngineKind(name, "", "", (), profile=f"{HERE}:profile", captures={"cuda-graphs": f"{HERE}:{how}"})
    )


@pytest.mark.parametrize("capture", ["graphs_and_plan"], indirect=True)
@pytest.mark.parametrize(
    ("how", "engine", "length", "kept"),
    [
        ("no_graphs", "toy", None, False),  # as with other flags: a start would still use the old ones
        ("failing", "toy", None, True),
        ("no_graphs", "other", None, True),
        ("no_graphs", "toy", 7, True),
        ("graphs_and_plan", "toy", None, True),
    ],
)
def test_what_is_not_made_again_for_the_same_start_is_not_kept(
    capture: str, checkpoint: Path, how: str, engine: str, length: int | None, kept: bool
) -> None:
    settings = Settings(model=str(checkpoint), engine="toy", device="cuda")
    for again in (False, True):
        if again:
            engine_that_captures(how, engine)
            settings = replace(settings, engine=engine, max_model_len=length)
        with Materialization(settings, None) as making:
            making.prepare()
            manifest = making.commit()
    assert ([one.kind for one in manifest.artifacts].count("cuda-graphs") == 1) == kept
