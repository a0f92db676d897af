"""The KV plan of `--engine vllm`: measured offline, used while it fits, else made anew with one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.config import Settings
from medusa_runtime.state.bundle.manifest import Manifest
from medusa_runtime.state.bundle.writer import BundleWriter
from medusa_runtime.state.key import Facts, Subject
from medusa_runtime.state.kinds import KV_PLAN
from medusa_runtime.state.kv_plan import KvPlan
from medusa_vllm.cpu.kv_profile import capture

PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KvPlan]:
    """The example with a bundle that holds nothing but the plan."""
    example = Path(__file__).parents[3] / "examples" / "pydoc-lm"
    folder = tmp_path_factory.mktemp("planned") / "model"
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns(".medusa"))
    settings = Settings(model=str(folder), engine="vllm")
    file = capture(str(folder), settings, tmp_path_factory.mktemp("scratch"))
    assert file is not None
    checkpoint = open_checkpoint(str(folder))
    facts = Facts(Subject(checkpoint.index, checkpoint.files, settings))
    with BundleWriter(folder / ".medusa") as writer:
        writer.commit(Manifest((writer.add(KV_PLAN.name, facts.key(KV_PLAN.facts), file),)))
    checkpoint.store.close()
    return folder, KvPlan.from_bytes(file.read_bytes())


def planned(serving: Any) -> tuple[int, str]:
    body = {"prompt": "Return the", "max_tokens": 4, "temperature": 0}
    status, answer, _ = serving.request("POST", "/v1/completions", body, timeout_s=PATIENCE_S)
    assert status == 200, answer
    stages = serving.request("GET", "/timeline")[1]["stages"]
    (detail,) = [stage["detail"] for stage in stages if stage["name"] == "kv_plan"]
    return detail["tokens"], detail["source"]


def test_a_start_takes_what_was_recorded_or_plans_for_what_is_free(
    start: Callable[..., Any], model: tuple[Path, KvPlan]
) -> None:
    folder, recorded = model
    assert recorded.tokens == 64 * 512  # what 64 requests of 512 tokens need, however much was free
    assert recorded.activation_bytes > 0
    serving = start("--model", folder, "--engine", "vllm")
    assert planned(serving) == (recorded.tokens, "recorded")
    assert "KV plan" not in serving.output()
    assert serving.stop() == 0
    weights = (folder / "model.safetensors").stat().st_size
    limit_mb = (recorded.needed_bytes - recorded.cache_bytes // 2 + 2 * weights) >> 20
    serving = start("--model", folder, "--engine", "vllm", "--memory-limit-mb", str(limit_mb))
    tokens, source = planned(serving)
    assert (source, 0 < tokens < recorded.tokens) == ("recomputed", True)
    assert serving.output().count("INFO: the KV cache gets what is free here now, ") == 1
    assert serving.stop() == 0
