"""The GPU's decode attention: its results in triton's interpreter, and that it compiles for a GPU nobody has here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("run_paged_triton.py")
SHAPES = {
    "grouped": {"heads": 8, "kv_heads": 2, "head_dim": 64},
    "one-kv-head": {"heads": 71, "kv_heads": 1, "head_dim": 64},  # Falcon-7B's
    "no-groups": {"heads": 4, "kv_heads": 4, "head_dim": 80},  # not a power of two
    "window": {"heads": 4, "kv_heads": 2, "head_dim": 32, "window": 70},
    "half": {"heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": "float16"},  # the interpreter multiplies bf16 wrongly
}


def run(mode: str, shape: dict[str, object], **environ: str) -> dict[str, object]:
    """In a process of its own: triton decides at its import whether it interprets."""
    command = [sys.executable, str(SCRIPT), mode, json.dumps(shape)]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", SHAPES)
def test_it_computes_what_torch_computes(name: str) -> None:
    pytest.importorskip("numpy", reason="triton's interpreter needs numpy")
    found = run("interpret", SHAPES[name], TRITON_INTERPRET="1")
    assert found["nan"] is False
    assert found["written"] is True
    assert float(str(found["error"])) < (1e-3 if name == "half" else 1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_it_compiles_for_hopper(name: str, tmp_path: Path) -> None:
    found = run("compile", SHAPES[name], TRITON_CACHE_DIR=str(tmp_path))
    assert found["target"] == "sm_90"
    assert int(str(found["cubin_bytes"])) > 1000
    assert int(str(found["shared_bytes"])) <= 227 << 10, "more than a processor has"
    window = SHAPES[name].get("window", 0)
    attends = [f"_attend_splits{splits}_window{window}" for splits in (1, 4)]
    expected = [*attends, "_combine_splits1", "_combine_splits4", "_write"]
    assert found["names"] == expected, "variants must not share a name"


def test_no_step_waits_for_another_variant_of_a_kernel() -> None:
    assert run("variants", SHAPES["half"]) == {"_attend": 1, "_write": 1}
