"""If vLLM refuses to start, the instance ends with one line, which says what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_environ import plain_environ

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


def refused(*arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "medusa_adapters", "serve", "--engine", "vllm", "--host", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--port", "0", "--node-socket", "none", *arguments],
        capture_output=True, text=True, env=plain_environ(), timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()[-1]


def test_more_memory_for_the_cache_than_there_is(example: Path) -> None:
    status, line = refused("--model", example, "--max-concurrency", "1000000", "--kv-cache-mb", "100000000")
    assert status == 2
    assert re.fullmatch(
        r"medusa: expected [\d.]+ GiB of free memory for the KV cache, vLLM found [\d.]+ of [\d.]+ GiB; give the "
        r"container more memory, or lower --kv-cache-mb \[Config\.Invalid\]",
        line,
    ), line


def test_a_configuration_that_contradicts_itself(example: Path, tmp_path: Path) -> None:
    shutil.copytree(example, tmp_path / "model", ignore=shutil.ignore_patterns(".medusa"))
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 100}))
    status, line = refused("--model", tmp_path / "model")
    expected = "The hidden size (100) is not a multiple of the number of attention heads (8)."
    assert (status, line) == (1, f"medusa: config.json cannot be used: {expected} [Weights.Invalid]")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--middleware nowhere.Middleware",
            "--middleware: .* found 'nowhere.Middleware': ModuleNotFoundError: No module",
        ),
        ("--middleware json.nothing", "--middleware: .* found 'json.nothing': AttributeError"),
        ("--enable-auto-tool-choice --tool-call-parser nowhere", "nowhere"),
        ("--enable-auto-tool-choice --tool-call-parser mine --tool-parser-plugin /no/file.py", "mine"),
        ("--chat-template /no/file.jinja", "/no/file.jinja"),
        ("--enable-lora --lora-modules a=/no/adapter", "/no/adapter"),
    ],
)
def test_flags_with_which_vllms_server_does_not_start(example: Path, flags: str, said: str) -> None:
    """The instance became ready, and every request got the error."""
    status, line = refused("--model", example, "--kv-cache-mb", "64", "--", *flags.split())
    assert re.fullmatch(rf"medusa: .*{said}.* \[Config\.Invalid\]", line), line
    assert status == 2


def _scaled(tensors: dict[str, Any], scale: Any) -> dict[str, Any]:
    import torch

    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        found[name] = (tensors[name].float() * 100).round().clamp(-127, 127).to(torch.int8)
        if scale is not None:
            found[name.replace("weight", "weight_scale")] = torch.full(scale, 0.01)
    return found


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (None, r"model\.layers\.0\.[\w.]+: expected the tensors weight, weight_scale, found no weight_scale"),
        (
            (7, 1),
            r"vLLM cannot take the checkpoint's model\.layers\.0\.[\w.]+_scale of shape \[7, 1\]: .*config\.json.*",
        ),
    ],
)
def test_quantized_weights_without_their_scales(example: Path, tmp_path: Path, scale: Any, said: str) -> None:
    """vLLM answered nonsense without scales, and gave no reason for scales of another shape."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(example, tmp_path / "model", ignore=shutil.ignore_patterns(".medusa"))
    save_file(_scaled(load_file(model / "model.safetensors"), scale), model / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": weights | {"strategy": "token", "dynamic": True},
    }
    method = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    method |= {"ignore": ["lm_head"], "config_groups": {"group_0": group}}
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": method}
    (model / "config.json").write_text(json.dumps(config))
    status, line = refused("--model", model)
    assert re.fullmatch(rf"medusa: {said} \[Weights\.Mismatch\]", line), line
    assert status == 1


def test_a_tensor_of_another_shape_or_none_at_all(example: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(example, tmp_path / "model", ignore=shutil.ignore_patterns(".medusa"))
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name][:4, :4].contiguous()}, model / "model.safetensors")
    status, line = refused("--model", model)
    assert line.startswith(f"medusa: vLLM cannot take the checkpoint's {name} of shape [4, 4]: ")
    assert (status, line.endswith(" [Weights.Mismatch]")) == (1, True)
    del tensors[name]
    save_file(tensors, model / "model.safetensors")
    serving = start("--model", model, "--engine", "vllm", "--kv-cache-mb", "64")
    assert serving.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, 300)[0] == 200
    assert f"the checkpoint has no tensor for {name} of vLLM's model" in serving.output()
    assert serving.stop() == 0
