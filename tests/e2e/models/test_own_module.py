"""`--engine none`: a handler that builds its own module from the weights, in real processes."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_command import medusa
from safetensors.torch import save_file
from slow_origin import serving_origin

Start = Callable[..., Any]
HANDLER = Path(__file__).parents[2] / "functions" / "own_module" / "handler.py"


BACKWARDS = Path(__file__).parents[2] / "functions" / "backwards" / "handler.py"


def reference(handler: Path = HANDLER) -> Any:
    spec = importlib.util.spec_from_file_location(f"{handler.parent.name}_handler", handler)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(3)
    return module.Net().eval()


def stored(net: Any) -> dict[str, torch.Tensor]:
    return {f"net.{name}": tensor for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "torch_import"), [("model.safetensors", "auto"), ("model.pt", "auto"), ("model.safetensors", "plain")]
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


@pytest.mark.forked
def test_a_checkpoint_that_does_not_fit_ends_the_instance(start: Start, tmp_path: Path) -> None:
    """With its reason, whoever asks or not: else a rollout of it would look well."""
    tensors = {f"module.{name}": tensor for name, tensor in stored(reference()).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    serving = start("--model", tmp_path, "--engine", "none", "--handler", HANDLER)
    assert serving.process.wait(60) == 1
    assert "Expected prefix='module.net.' of build?" in serving.output()
    assert "Traceback" not in serving.output()


@pytest.mark.forked
def test_without_a_handler_there_is_nothing_to_run(start: Start, tmp_path: Path) -> None:
    serving = start("--model", tmp_path, "--engine", "none")
    assert serving.process.wait(120) == 2
    assert "with --engine none nothing runs the model: expected --handler" in serving.output()


def fetched_layers(start: Start, folder: Path) -> list[str]:
    """The layers' weights in the order in which a start asks an origin for them."""
    stored_layers = [f"net.layers.{number}.weight" for number in range(8)]
    with serving_origin(folder, bytes_per_s=1e9) as origin:
        options = ("--engine", "none", "--handler", BACKWARDS, "--connections", "1")
        serving = start("--model", origin.url, *options)
        serving.wait_ready()
        while serving.request("GET", "/readyz")[1]["state"] != "done":
            time.sleep(0.01)
        assert serving.stop() == 0
        header_bytes = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
        header = json.loads((folder / "model.safetensors").read_bytes()[8 : 8 + header_bytes])
    found: dict[str, None] = {}
    for begin, end in origin.ranges:
        for name in stored_layers:
            middle = 8 + header_bytes + sum(header[name]["data_offsets"]) // 2
            if begin <= middle < end:
                found[name] = None
    return [name.split(".")[2] for name in found]


@pytest.mark.forked
def test_the_order_of_a_forward_is_recorded_and_drives_the_fetch(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(stored(reference(BACKWARDS)), folder / "model.safetensors")
    forth = [str(number) for number in range(8)]
    assert fetched_layers(start, folder) == forth, "nothing is known but the construction"
    made = medusa(
        "materialize", "--engine", "none", "--model", folder, "--handler", BACKWARDS, "--request", '{"value": 0.5}'
    )
    assert made.returncode == 0, made.stderr
    assert fetched_layers(start, folder) == forth[::-1]


def test_a_request_that_shows_no_order_is_told(tmp_path: Path) -> None:
    save_file(stored(reference(BACKWARDS)), tmp_path / "model.safetensors")
    (tmp_path / "idle.py").write_text("def handle(request): return request.text\n")
    handler = ("--model", tmp_path, "--handler")
    for arguments, status, said in (
        ((*handler, BACKWARDS), 0, "order          left out: expected --request BODY"),
        ((*handler, BACKWARDS, "--request", "{}"), 1, "failed at the request: KeyError: 'value'"),
        ((*handler, BACKWARDS, "--request", "{"), 1, "refused the request with 400: expected a JSON body"),
        ((*handler, BACKWARDS, "--request", "@nowhere"), 2, "expected a file that can be read"),
        ((*handler, tmp_path / "idle.py", "--request", "x"), 1, "used none of the weights"),
        (("--model", tmp_path, "--request", "x"), 2, "expected --engine none --handler"),
    ):
        made = medusa("materialize", "--engine", "none", *arguments)
        assert made.returncode == status, made.stderr
        assert said in made.stdout + made.stderr
        assert (tmp_path / ".medusa" / "manifest.json").exists() == (not status)
        shutil.rmtree(tmp_path / ".medusa", ignore_errors=True)
