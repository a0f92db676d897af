"""Weights through the region into vLLM's models give the tokens of vLLM's own loader."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_runtime.kernels import has_native_products

from benchmarks.ranged_server import RangedServer

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


def written(folder: Path, quantization: str | None) -> Path:
    spec = importlib.util.spec_from_file_location("quantized", HERE / "quantized.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.write_checkpoint(folder, quantization))


def run(*arguments: Path | str) -> dict[str, Any]:
    command = [sys.executable, HERE / "run_vllm.py", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


@pytest.mark.parametrize(("quantization", "kernels"), [(None, "auto"), (None, "library"), ("int8", "auto")])
def test_a_sharded_checkpoint_gives_the_tokens_of_vllms_own_loader(
    tmp_path: Path, quantization: str | None, kernels: str
) -> None:
    answer = run(written(tmp_path, quantization), kernels)
    assert answer["tokens"] == answer["theirs"]
    assert answer["reason"] == "length"
    assert len(answer["logprobs"]) == len(answer["tokens"])
    assert {"config", "kv_plan", "core", "skeleton", "apply", "kv_cache", "first_token"} <= set(answer["stages"])
    embeddings = 512 * 256 * 2
    assert answer["shared_parameter_bytes"] >= embeddings  # not copied: they lie in the mapped file
    if quantization is None and kernels == "auto" and has_native_products(torch.bfloat16):
        assert answer["stored"] == 2 * 4 + 1
        products = 2 * (256 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 512 * 256) * 2
        assert answer["shared_parameter_bytes"] >= 2 * embeddings + products  # fused layers, too
    elif kernels == "library":
        assert answer["stored"] is None
    assert answer["compilations"] == 0
    assert answer["prefill_tokens_per_s"] > 0


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tensors_that_are_on_the_device_already_give_the_same_tokens(
    tmp_path: Path, quantization: str | None, fake_library: Path
) -> None:
    """From a store, with `--host-weights release`."""
    folder = written(tmp_path, quantization)
    with RangedServer(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answer = run(folder, "library", f"http://127.0.0.1:{server.server_port}", fake_library)
        server.shutdown()
    assert answer["tokens"] == answer["theirs"]
    assert answer["handed"] > 10
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert answer["held_bytes"] < weights / 10, f"of {weights}"
