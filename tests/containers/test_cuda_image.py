"""The cuda variant, as far as a machine without a GPU can tell: imports, kernels, and what it says is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import EXAMPLE, ROOT, podman

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1200)]

IMAGE = "localhost/medusa-runtime:cuda"
LIMIT_GB = "7.2"
CONFINED = ("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:mode=1777", "--cap-drop", "all")
CONFINED += ("--security-opt", "no-new-privileges", "--user", "1000", "--ipc", "none")
MODEL = ("--volume", f"{EXAMPLE}:/model:ro", "--env", "MEDUSA_MODEL=/model", "--env", "MEDUSA_KV_CACHE_MB=64")
TRITON = ROOT / "tests/runtime/kernels/run_paged_triton.py"


@pytest.fixture
def image(engine: None) -> str:
    if podman("image", "exists", IMAGE, check=False).returncode:
        pytest.skip(f"{IMAGE} takes gigabytes and half an hour to build: make image VARIANTS=cuda")
    return IMAGE


def python(image: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
    options = ("--rm", "--network", "none", *CONFINED, *options, "--entrypoint", "python")
    return podman("run", *options, image, *arguments, timeout_s=300).stdout.strip()


def test_torch_is_the_one_for_cuda_and_vllm_imports(image: str) -> None:
    code = "import torch, vllm, triton; print(torch.__version__, torch.version.cuda.split('.')[0], vllm.__version__)"
    torch_version, cuda, vllm_version = python(image, "-W", "ignore", "-c", code).split()
    assert (torch_version.partition("+")[0], cuda, vllm_version) == ("2.13.0", "13", "0.32.0")


def test_what_a_start_of_vllm_imports_is_there(image: str) -> None:
    """All that the zygote imports for a GPU; what was removed from the image is not missed."""
    code = """
from medusa_runtime.config import from_env
from medusa_vllm.imports import preimport
preimport(from_env({}, engine="vllm", model="."))
import sys
print([name in sys.modules for name in ("vllm.v1.worker.gpu_worker", "triton", "tilelang", "flashinfer")])
"""
    assert python(image, "-c", code).splitlines()[-1] == "[True, True, False, False]"


def test_kernels_are_compiled_for_a_gpu(image: str) -> None:
    """Triton and ptxas are whole: our attention becomes machine code for sm_90."""
    shape = json.dumps({"heads": 32, "kv_heads": 8, "head_dim": 128})
    script = ("--volume", f"{TRITON}:/script.py:ro")
    made = json.loads(python(image, "/script.py", "compile", shape, options=script).splitlines()[-1])
    assert made["target"] == "sm_90"
    assert made["cubin_bytes"] > 10_000


def test_doctor_tells_that_there_is_no_gpu(image: str) -> None:
    ran = podman("run", "--rm", *CONFINED, image, "doctor")
    (line,) = [line for line in ran.stdout.splitlines() if "built for CUDA 13" in line]
    assert line.startswith("warn")
    assert "no GPU here" in line
    assert ran.stderr == ""


def test_cuda_asked_for_and_missing_is_one_clear_error(start: Callable[..., Any], image: str) -> None:
    container = start(image, *CONFINED, *MODEL, command=("serve", "--device", "cuda"))
    assert container.wait() == 1
    (line,) = [line for line in container.logs().splitlines() if line.startswith("medusa: ")]
    assert "--device cuda cannot be used: expected a GPU's device files" in line
    assert "Traceback" not in container.logs()


def test_vllm_without_a_gpu_is_one_clear_error(start: Callable[..., Any], image: str) -> None:
    container = start(image, *CONFINED, *MODEL, command=("serve", "--engine", "vllm"))
    assert container.wait() == 1
    (line,) = [line for line in container.logs().splitlines() if line.startswith("medusa: ")]
    assert "this vLLM was built for GPUs, expected one, found none" in line
    assert "Traceback" not in container.logs()


def test_without_a_gpu_the_torch_engine_serves_on_the_cpu(start: Callable[..., Any], image: str) -> None:
    container = start(image, *CONFINED, *MODEL)
    container.wait_ready()
    status, answer = container.request("POST", "/v1/completions", {"prompt": "This", "max_tokens": 4, "temperature": 0})
    assert status == 200, answer
    assert answer["choices"][0]["text"].strip()
    podman("stop", "--time", "30", container.name)
    assert container.state("ExitCode") == "0", container.logs()


def test_size(image: str) -> None:
    command = [sys.executable, str(ROOT / "images/layers.py"), image, "--limit-gb", LIMIT_GB]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
