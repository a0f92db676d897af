"""Inductor's kernels, taken from the process that compiled them to one that cannot compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from medusa_vllm.compiled.compilations import compilations
from medusa_vllm.compiled.kernels import digest

# A process of its own each: torch.compile keeps state, and warns of what it does.
COMMON = """
import json, sys
from pathlib import Path
import torch
from medusa_runtime.errors import StateError
from medusa_vllm.compiled.compilations import compilations
from medusa_vllm.compiled.kernels import CompiledKernels

class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(64.0).reshape(8, 8) / 64)

    def forward(self, x):
        return torch.relu(x @ self.weight) + torch.sin(x.sum(-1, keepdim=True))

folder = Path(sys.argv[1])
kernels, module, x = CompiledKernels(folder / "kernels"), Module(), torch.arange(40.0).reshape(5, 8) / 40
"""
COMPILE = """
with torch.no_grad(), kernels.recording():
    function = torch.compile(module.forward, fullgraph=True, dynamic=True).aot_compile(((x[:4],), {}))
    function.save_compiled_function(str(folder / "function"))
    function.disable_guard_check()  # as vLLM has it
    out = function(module, x)
print(json.dumps({"out": out.tolist(), "recorded": kernels.recorded, "counts": compilations()}))
"""
LOAD = """
with torch.no_grad():
    try:
        with kernels.serving(), open(folder / "function", "rb") as file:
            function = torch.compiler.load_compiled_function(file)
        function.disable_guard_check()
        out = function(module, x).tolist()
    except StateError as error:
        out = str(error)
print(json.dumps({"out": out, "loaded": kernels.loaded, "counts": compilations()}))
"""


def run(code: str, folder: Path, **env: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-c", COMMON + code, folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, **env},
    )
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_process_without_a_compiler_runs_what_another_one_compiled(tmp_path: Path) -> None:
    made = run(COMPILE, tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "there"))
    assert made["recorded"] == 1
    traced, generated, built = made["counts"]
    assert traced == generated == 1
    assert built >= 1
    nowhere = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "here"), "CXX": "/bin/false", "CC": "/bin/false"}
    loaded = run(LOAD, tmp_path, **nowhere)
    assert loaded == {"out": made["out"], "loaded": 1, "counts": [0, 0, 0]}
    (library,) = (tmp_path / "kernels").iterdir()
    library.unlink()
    lacking = run(LOAD, tmp_path, **nowhere)
    assert library.stem in str(lacking["out"])
    assert lacking["counts"] == [0, 0, 0]


def test_a_kernels_name_is_its_source_and_its_arguments() -> None:
    names = {digest(types, source) for types in (["float*"], ["float*", "long"]) for source in ("a", "b")}
    assert len(names) == 4
    assert digest(["float*"], "a") in names
    assert all(name.isalnum() for name in names)


def test_nothing_is_compiled_where_torch_was_not_imported() -> None:
    code = "import sys\nfrom medusa_vllm.compiled.compilations import compilations\n"
    code += "print(tuple(compilations()), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert ran.stdout.split("\n")[0] == "(0, 0, 0) False"
    assert len(compilations()) == 3
