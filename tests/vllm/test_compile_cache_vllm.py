"""vLLM starts from a compile cache, without a compiler and in other folders, and compiles nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_vllm.compiled.cache import capture

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "pydoc-lm"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture")
    settings = Settings(model=str(EXAMPLE), engine="vllm", kv_cache_mb=64, max_concurrency=4)
    return capture(str(EXAMPLE), settings, folder)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """Start with another home, folder and PATH than at the capture, and a compiler that only fails."""

    def run(blob: Path | str, **settings: Any) -> dict[str, Any]:
        elsewhere = tmp_path / "elsewhere"
        if not elsewhere.exists():
            shutil.copytree(EXAMPLE, elsewhere)
        temporary = tmp_path / "tmp"
        temporary.mkdir(exist_ok=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MEDUSA_", "VLLM_", "TORCHINDUCTOR_"))}
        env |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(temporary), "CXX": "/bin/false", "CC": "/bin/false"}
        command = [sys.executable, str(HERE / "run_compiled.py"), str(elsewhere), str(blob), json.dumps(settings)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
        assert ran.returncode == 0, ran.stderr
        assert not list(temporary.glob("medusa-*")), "a private folder was left behind"
        answer: dict[str, Any] = json.loads(ran.stdout)
        return answer | {"said": ran.stderr}

    return run


def test_a_start_elsewhere_compiles_nothing_and_says_the_same(blob: Path, start: Callable[..., Any]) -> None:
    compiled, eager = start(blob), start("none", compile="never")
    assert compiled["stages"]["compiled_attach"]["functions"] >= 1
    assert compiled["compilations"] == 0
    assert compiled["tokens"] == eager["tokens"]
    assert len(compiled["tokens"]) == 24
    assert "compiled_attach" not in eager["stages"]


def test_another_configuration_starts_eagerly_and_says_so_once(blob: Path, start: Callable[..., Any]) -> None:
    answer = start(blob, max_concurrency=8)
    assert answer["said"].count("compile-cache is not used") == 1
    assert "compiled_attach" not in answer["stages"]
    assert answer["compilations"] == 0
    assert len(answer["tokens"]) == 24


@pytest.mark.parametrize("damage", ["kernel", "function"])
def test_a_part_that_is_missing_or_cut_costs_the_compiled_start_alone(
    blob: Path, start: Callable[..., Any], tmp_path: Path, damage: str
) -> None:
    """The file itself is whole, so that only vLLM's worker finds out."""
    damaged = tmp_path / "damaged"
    with zipfile.ZipFile(blob) as old, zipfile.ZipFile(damaged, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if damage == "kernel" and name.endswith(".so"):
                continue
            new.writestr(name, data[: len(data) // 2] if damage == "function" and name.endswith(".aot") else data)
    answer = start(damaged)
    assert answer["said"].count("compile-cache is not used") == 1
    assert answer["stages"]["compiled_attach"]["left_out"]
    assert answer["compilations"] == 0
    assert len(answer["tokens"]) == 24
