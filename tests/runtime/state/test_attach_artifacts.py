"""Artifacts beside the weights, lent to one reader of a region that was filled without them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fetching import fetch_into
from medusa_runtime.config import Settings
from medusa_runtime.region.reader import Region
from medusa_runtime.state.attach_artifacts import attach_artifacts
from medusa_runtime.state.bundle.locate import FOLDER
from medusa_runtime.state.bundle.manifest import Manifest
from medusa_runtime.state.bundle.writer import BundleWriter
from medusa_runtime.state.key import Facts, Subject
from medusa_runtime.state.kinds import CUDA_GRAPHS, KV_PLAN, file_name
from medusa_runtime.state.trust import Trust
from medusa_runtime.timeline import Timeline
from medusa_vllm import COMPILE_CACHE

EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
NAME = file_name(KV_PLAN.name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "model"))


def filled(model: Path) -> tuple[Region, Settings]:
    settings = Settings(model=str(model))
    region = Region.create()
    fetch_into(region, str(model), settings)
    return region, settings


def materialize(model: Path, region: Region, settings: Settings) -> None:
    files = {"config.json": region.file("config.json") or b""}
    facts = Facts(Subject(region.wait_index(), files, settings))
    with BundleWriter(model / FOLDER) as writer:
        writer.commit(Manifest((writer.add(KV_PLAN.name, facts.key(KV_PLAN.facts), b"a plan"),)))


def test_a_reader_is_lent_what_fits_it_and_others_are_not(model: Path) -> None:
    region, settings = filled(model)
    materialize(model, region, settings)
    timeline = Timeline.create("engine")
    attach_artifacts(region, str(model), settings, timeline)
    assert region.file(NAME) == b"a plan"
    assert Region(region.fd).file(NAME) is None
    assert [stage.detail["artifact"] for stage in timeline.stages()] == [KV_PLAN.name]
    region.close()


def test_the_bundle_of_a_model_that_is_named_by_its_file_is_beside_it(model: Path) -> None:
    region, settings = filled(model)
    materialize(model, region, settings)
    timeline = Timeline.create("engine")
    attach_artifacts(region, str(model / "model.safetensors"), settings, timeline)
    assert region.file(NAME) == b"a plan"
    assert "left_out" not in timeline.stages()[0].detail
    region.close()


def test_the_agents_prefetcher_gives_no_code_to_engines(model: Path, start_node: Callable[..., Any]) -> None:
    """Their process is the agent's; what runs there is lent by ``lend``, as the agent's ``--trust-state`` allows."""
    region, settings = filled(model)
    facts = Facts(Subject(region.wait_index(), {"config.json": region.file("config.json") or b""}, settings))
    with BundleWriter(model / FOLDER) as writer:
        kinds = [KV_PLAN, COMPILE_CACHE, CUDA_GRAPHS]
        vllm = Facts(replace(facts.subject, settings=replace(settings, engine="vllm")))
        keys = [(vllm if kind is COMPILE_CACHE else facts).key(kind.facts) for kind in kinds]
        found = [writer.add(kind.name, key, b"code") for kind, key in zip(kinds, keys, strict=True)]
        writer.commit(Manifest(tuple(found)))
    region.close()
    with closing(start_node().client().region(str(model))) as shared:
        assert [shared.file(file_name(kind.name)) for kind in kinds] == [b"code", None, None]


@pytest.mark.parametrize("trusted", [True, False])
def test_code_is_lent_as_the_reader_trusts_and_data_always(model: Path, trusted: bool) -> None:
    """The agent says from where, whoever the file belongs to."""
    region, settings = filled(model)
    facts = Facts(Subject(region.wait_index(), {"config.json": region.file("config.json") or b""}, settings))
    with BundleWriter(model / FOLDER) as writer:
        kinds = [KV_PLAN, CUDA_GRAPHS]
        writer.commit(Manifest(tuple(writer.add(kind.name, facts.key(kind.facts), b"made") for kind in kinds)))
    trust = Trust.parse(str(model.parent if trusted else model / "else"), None)
    timeline = Timeline.create("engine")
    attach_artifacts(region, str(model), settings, timeline, trust)
    assert region.file(NAME) == b"made"
    assert region.code(file_name(CUDA_GRAPHS.name)) == (b"made" if trusted else None)
    said = [stage.detail["left_out"] for stage in timeline.stages() if "left_out" in stage.detail]
    assert ["--trust-state=" in text for text in said] == [True] * (not trusted)
    region.close()


def test_nothing_is_lent_where_there_is_no_bundle(model: Path) -> None:
    region, settings = filled(model)
    attach_artifacts(region, str(model), settings, Timeline.create("engine"))
    assert region.file(NAME) is None
    region.close()


@pytest.mark.parametrize("damage", ["another length", "a damaged blob", "no manifest"])
def test_what_does_not_fit_is_left_out_and_said(model: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    region, settings = filled(model)
    materialize(model, region, settings)
    manifest = model / FOLDER / "manifest.json"
    if damage == "another length":
        settings = Settings(model=str(model), max_model_len=64)
    elif damage == "a damaged blob":
        manifest.write_text(manifest.read_text().replace('"inline": "', '"inline": "YW5v'))
    else:
        manifest.write_text("{")
    timeline = Timeline.create("engine")
    with caplog.at_level(logging.WARNING):
        attach_artifacts(region, str(model), settings, timeline)
    assert region.file(NAME) is None
    assert caplog.text.count("is not used") == 1
    assert timeline.stages()[0].detail["left_out"]
    region.close()
