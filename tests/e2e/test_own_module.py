"""`--engine none`: a handler that builds its own module from the weights, in real processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

Start = Callable[..., Any]
HANDLER = Path(__file__).parents[1] / "functions" / "own_module" / "handler.py"


def reference() -> Any:
    spec = importlib.util.spec_from_file_location("own_module_handler", HANDLER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(3)
    return module.Net().eval()


def stored(net: Any) -> dict[str, torch.Tensor]:
    return {f"net.{name}": tensor for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "torch_import"), [("model.safetensors", "plain"), ("model.pt", "plain"), ("model.safetensors", "lean")]
)
def test_answers_as_eager_loading_does(start: Start, tmp_path: Path, name: str, torch_import: str) -> None:
    net = reference()
    (save_file if name.endswith("safetensors") else torch.save)(stored(net), tmp_path / name)
    options = ("--engine", "none", "--handler", HANDLER, "--torch-import", torch_import)
    serving = start("--model", tmp_path / name, *options)
    status, answer, _ = serving.request("POST", "/", {"value": 0.5})
    assert status == 200, answer
    with torch.inference_mode():
        expected = net(torch.full((1, 3, 8, 8), 0.5))[0]
    torch.testing.assert_close(torch.tensor(answer["logits"]), expected)
    serving.wait_ready()
    assert not {"zygote", "engine"} & set(serving.children().values())
    assert serving.request("GET", "/readyz")[1]["state"] == "done"
    assert serving.stop() == 0


def test_a_checkpoint_that_does_not_fit_fails_the_request(start: Start, tmp_path: Path) -> None:
    tensors = stored(reference())
    del tensors["net.head.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    serving = start("--model", tmp_path, "--engine", "none", "--handler", HANDLER)
    status, answer, _ = serving.request("POST", "/", {"value": 1})
    assert status == 503
    assert "1 missing: head.bias" in answer["error"]
    assert serving.stop() == 0


def test_without_a_handler_there_is_nothing_to_run(start: Start, tmp_path: Path) -> None:
    serving = start("--model", tmp_path, "--engine", "none")
    assert serving.process.wait(30) == 2
    assert "with --engine none nothing runs the model: expected --handler" in serving.output()
