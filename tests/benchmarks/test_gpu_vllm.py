"""Run 5 of the check of a GPU: which parts it has, what its lines say, and the stand-in for vLLM's extensions."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import run, summary
from benchmarks.gpu.run import Check, Part

STAND_IN = Path(run._STAND_IN)
HERE = {"vllm": "0.32.0", "torch": "2.13.0", "platform": "CudaPlatform", "device": "a GPU", "replaced": {}}


def test_without_vllm_one_line_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "has_vllm", lambda: False)
    arguments = ["--dry-run", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert run.main([*arguments, "--run", "5"]) == 0
    lines = [line for line in (tmp_path / "out/summary.txt").read_text().splitlines() if "vLLM" in line]
    assert lines == [
        "----  vLLM: not measured: it is not installed here: pip install 'vllm==0.32.0', and start run 5 again"
    ]
    assert (tmp_path / "out/run-5.tar.gz").exists()


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """A check of a GPU where vLLM is installed, which makes no checkpoints."""
    monkeypatch.setattr(run, "has_vllm", lambda: True)
    (tmp_path / "out").mkdir()
    made = Check(tmp_path / "out", tmp_path, dry_run=False, budget_s=300)
    monkeypatch.setattr(made, "checkpoint", lambda shape: tmp_path / shape)
    return made


def steps(check: Check, monkeypatch: pytest.MonkeyPatch, here: dict[str, Any]) -> list[list[list[Part]]]:
    """The steps of run 5 where a first part has found this vLLM."""
    monkeypatch.setattr(check, "run", lambda part: check.keep(part.key, here))
    return [[list(lane) for lane in lanes] for lanes in run.steps(5, check, ["small-0.5b", "large"])]


def test_the_small_model_comes_first_and_vllms_own_starts_are_alone(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = steps(check, monkeypatch, HERE)
    ours, theirs = ["materialize", "restored", "captured"], ["stock", "stock"]
    names = [[[part.name for part in lane] for lane in lanes] for lanes in found]
    assert names == [[ours, ours], [theirs], [theirs]] * 2
    keys = [[lane[0].key for lane in lanes] for lanes in found]
    assert keys == [
        each
        for shape in ("small-0.5b", "large")
        for each in (
            [f"{shape} vllm bundle", f"{shape} vllm compiled bundle"],
            [f"{shape} vllm cold"],
            [f"{shape} vllm compiled cold"],
        )
    ]
    assert [{part.arguments[5] for part in lane} for lane in found[0]] == [{"never"}, {"always"}]
    assert ["--by-command" in lane[0].arguments for lane in found[0]] == [True, False]
    parts = [part for lanes in found for lane in lanes for part in lane]
    assert len({part.key for part in parts}) == 20
    assert len({part.arguments[3] for part in parts}) == 4, "two kinds of start share a bundle"
    assert [part.key.split(" ")[-1] for part in parts if "--empty-caches" in part.arguments] == ["cold"] * 4
    assert {path.name for part in parts if (path := part.makes)} == {
        f"{shape}.{how}.graphs" for shape in ("small-0.5b", "large") for how in ("vllm", "vllm-compiled")
    }
    assert not summary.shapes({part.key: {} for part in parts}), "the torch engine's rows count these parts"


def test_nothing_is_compiled_where_vllm_lacks_what_it_imports_for_that(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = steps(check, monkeypatch, {**HERE, "compiled_needs": ["openai"]})
    assert {part.arguments[5] for lanes in found for lane in lanes for part in lane} == {"never"}
    assert any("only eager models, as vLLM needs openai" in line for line in summary.lines(check.results))


def test_a_vllm_that_cannot_be_imported_costs_one_part(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not steps(check, monkeypatch, {"failed": "status 1"})
    assert list(check.results) == ["vllm"]
    assert "----  vLLM: not measured" in summary.lines(check.results)


def batch(**changes: Any) -> dict[str, Any]:
    return {"tokens": "t", "prompts": ["p"], "decode": ["a", "b", "c"], **changes}


def results(**changes: dict[str, Any]) -> dict[str, Any]:
    captured = {
        "loading_s": 4.0, "stages": {"capture": 3.0}, "graphs": {"full": 35, "piecewise": 0, "captured": 35},
        "batches": {"1": batch(), "2": batch()}, "steps": {"1": 2.0},
    }  # fmt: skip
    restored = {**captured, "loading_s": 1.5, "stages": {"restore_graphs": 0.3}}
    found = {
        "vllm": HERE,
        "m vllm captured": captured,
        "m vllm bundle": {"kept": {"full": 35}, "refused_for": {}, "pinned": 0, "bytes": 1 << 20, "seconds": 60.0},
        "m vllm restored": {**restored, "graphs": {"full": 35, "piecewise": 0, "captured": 0}},
        "m vllm stock": {**captured, "loading_s": 6.0},
        "m vllm cold": {**captured, "loading_s": 60.0},
    }
    return {name: {**found[name], **changes.get(name.rpartition(" ")[2], {})} for name in found}


def judged(found: dict[str, Any], mark: str) -> list[str]:
    return [line for line in summary.lines(found) if line.startswith(mark) and " vLLM:" in line]


def test_what_run_5_reaches_is_said() -> None:
    assert not judged(results(), "MISS")
    reached = judged(results(), "ok")
    assert len(reached) == 7
    assert "ok    m: vLLM: 35 graphs restored in 0.30 s, 0 captured" in reached
    assert "ok    m: vLLM: loading phase 1.50 s against vLLM's own 6.00 s, 75.0% shorter" in reached
    assert "m: vLLM: vLLM's own loading phase with empty caches 60.00 s" in summary.lines(results())
    missing = [line for line in judged(results(), "----") if "llama-3-8b" in line]
    assert len(missing) == 6
    assert "----  llama-3-8b: vLLM: tokens and logits of restored graphs: not measured" in missing


def test_what_a_start_puts_off_is_measured_with_the_first_token() -> None:
    found = results(restored={"first_s": 0.5}, stock={"first_s": 2.0})
    assert "m: vLLM: with the first token: 2.00 s against 8.00 s, 75.0% shorter" in summary.lines(found)


def test_how_the_weights_come_is_measured_apart() -> None:
    found = results(restored={"stages": {"restore_graphs": 0.3, "load": 0.8}}, stock={"stages": {"load": 3.1}})
    assert "m: vLLM: the model and its weights in 0.80 s against 3.10 s" in summary.lines(found)
    assert not any("first token" in line for line in summary.lines(results()))


@pytest.mark.parametrize(
    ("part", "change", "line"),
    [
        ("bundle", {"refused_for": {"full: foreign-pointer": 3}}, "refused: 3 full: foreign-pointer"),
        ("restored", {"stages": {"restore_graphs": 1.2}}, "restored in 1.20 s"),
        ("restored", {"stages": {"restore_graphs": 0.5}}, "6.0 times"),
        ("restored", {"stages": {}}, "no graph was restored"),
        ("restored", {"batches": {"1": batch(), "2": batch(decode=["a", "b", "d"])}}, "that differ: 2"),
        ("stock", {"batches": {"1": batch(tokens="u"), "2": batch()}}, "vLLM's own worker: sizes that differ: 1"),
        ("restored", {"steps": {"1": 2.1}}, "1.050 of captured"),
        ("stock", {"loading_s": 2.0}, "25.0% shorter"),
    ],
)
def test_what_run_5_misses_is_said(part: str, change: dict[str, Any], line: str) -> None:
    assert any(line in said for said in judged(results(**{part: change}), "MISS"))


_PYTHON = """
import json, sys, torch
import vllm._C_stable_libtorch
from vllm.vllm_flash_attn import _vllm_fa2_C
import sitecustomize
import xgrammar.testing
assert isinstance(xgrammar.GrammarMatcher, type) and not hasattr(xgrammar, "__version__")
x = torch.ones(2, 4)
torch.ops._C.rms_norm(result := torch.empty(2, 4), x * 3, None, 0.0)
supported = torch.ops._C.cutlass_scaled_mm_supports_fp8(90)
print(json.dumps([sitecustomize.stand_in.replaced, result.tolist(), supported]))
"""


def test_missing_extensions_are_replaced_and_the_reason_is_kept(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "vllm_flash_attn").mkdir(parents=True)
    for folder in (package, package / "vllm_flash_attn"):
        (folder / "__init__.py").touch()
    (package / "_C_stable_libtorch.abi3.so").write_bytes(b"not a library")
    paths = os.pathsep.join([str(STAND_IN), str(tmp_path)])
    command = [sys.executable, "-c", _PYTHON]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    replaced, normed, supported = json.loads(done.stdout)
    assert replaced["vllm.vllm_flash_attn._vllm_fa2_C"] == "it is not there"
    assert "_C_stable_libtorch.abi3.so" in replaced["vllm._C_stable_libtorch"]
    assert normed == [[1.0] * 4] * 2
    assert supported is False


@pytest.fixture(scope="module")
def stand_in() -> ModuleType:
    """The stand-in, imported without a place among the finders of this process."""
    spec = importlib.util.spec_from_file_location("stand_in", STAND_IN / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    finders = list(sys.meta_path)
    spec.loader.exec_module(module)
    sys.meta_path[:] = finders
    return module


def test_the_stand_ins_functions_compute_what_vllms_kernels_do(stand_in: ModuleType) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    added = x + residual
    expected = torch.nn.functional.rms_norm(added, (8,), weight, 1e-6)
    stand_in.fused_add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(residual, added)
    stand_in.silu_and_mul(result := torch.empty(3, 4), x)
    torch.testing.assert_close(result, torch.nn.functional.silu(x[:, :4]) * x[:, 4:])


def test_the_stand_in_rotates_pairs_of_a_head(stand_in: ModuleType) -> None:
    angles = torch.arange(6).unsqueeze(1) * torch.tensor([1.0, 0.1])
    cache, positions = torch.cat([angles.cos(), angles.sin()], dim=1), torch.tensor([5, 0])
    query, key = torch.randn(2, 3 * 4), torch.randn(2, 4)
    before = {name: tensor.clone().view(2, -1, 4) for name, tensor in (("query", query), ("key", key))}
    stand_in.rotary_embedding(positions, query, key, 4, cache, True)

    def pairs(tensor: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(torch.stack(tensor.chunk(2, dim=-1), dim=-1).contiguous())

    factor = torch.polar(torch.ones(2, 2), angles[positions]).unsqueeze(1)
    for name, tensor in (("query", query), ("key", key)):
        torch.testing.assert_close(pairs(tensor.view(2, -1, 4)), pairs(before[name]) * factor)
    with pytest.raises(NotImplementedError):
        stand_in.rotary_embedding(positions, query, key, 4, cache, False)
