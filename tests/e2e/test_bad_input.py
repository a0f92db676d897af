"""What cannot be served ends within seconds, with one message, a non-zero exit status and nothing left behind."""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.forked

Start = Callable[..., Any]


def refused(serving: Any, *expected: str) -> None:
    assert serving.wait_gone(timeout_s=120) not in (0, None)
    output = serving.output()
    for text in expected:
        assert text in output
    assert "Traceback" not in output
    assert len([line for line in output.splitlines() if line.startswith("medusa: ")]) == 1, output


@pytest.fixture
def copy(example: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(example, tmp_path / "model"))


def test_no_such_folder(start: Start, tmp_path: Path) -> None:
    refused(start("--model", tmp_path / "nowhere"), "nowhere", "Storage.NotFound")


def test_a_working_directory_that_was_removed(start: Start, example: Path, tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    wrapper = ("sh", "-c", f'cd {gone} && rmdir {gone} && exec "$@"', "sh")
    refused(start("--model", example, wrapper=wrapper), "the working directory cannot be used", "Config.Invalid")


def test_a_folder_without_weights(start: Start, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(start("--model", tmp_path), "safetensors", "Storage.NotFound")


def test_weights_of_a_module_that_only_a_handler_knows(start: Start, copy: Path, tmp_path: Path) -> None:
    """`--engine none` was forgotten."""
    (copy / "config.json").unlink()
    (tmp_path / "handler.py").write_text("def handle(request):\n    return 'ok'\n")
    refused(start("--model", copy, "--handler", tmp_path / "handler.py"), "config.json", "--engine none")


def test_nobody_listens_at_the_store(start: Start) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refused(start("--model", f"http://127.0.0.1:{port}/model"), "Storage.Unreachable", str(port))


def test_a_reasoning_parser_that_is_vllms_affair(start: Start, example: Path) -> None:
    serving = start("--model", example, "--engine", "vllm", "--reasoning-parser", "qwen3")
    refused(serving, "--engine vllm", "-- --reasoning-parser qwen3")


def test_an_unknown_scheme(start: Start) -> None:
    refused(start("--model", "gopher://host/model"), "gopher", "s3")


@pytest.fixture
def forbidding() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/model"
        server.shutdown()


def test_a_store_that_forbids(start: Start, forbidding: str) -> None:
    refused(start("--model", forbidding), "Storage.Forbidden", "403")


def test_a_truncated_shard(start: Start, copy: Path) -> None:
    shard = copy / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    refused(start("--model", copy), "Weights.Corrupt", "model.safetensors")


def test_a_shard_that_is_no_safetensors(start: Start, copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)
    refused(start("--model", copy), "Weights.Corrupt", "model.safetensors")


@pytest.mark.parametrize(
    ("architecture", "kind", "said"),
    [("ZebraForCausalLM", "zebra", "LlamaForCausalLM"), ("MambaForCausalLM", "mamba", "layers that attend")],
)
def test_an_unsupported_architecture(start: Start, copy: Path, architecture: str, kind: str, said: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": [architecture], "model_type": kind}))
    refused(start("--model", copy), architecture, said, "vllm", "Model.Unsupported")


def test_a_chat_template_that_cannot_be_read_is_said_at_the_start(start: Start, copy: Path) -> None:
    """The first chat once had to find it. Completions need none of these files."""
    (copy / "tokenizer_config.json").write_text('{"chat_template": ')
    serving = start("--model", copy)
    serving.wait_ready()
    said = "chats cannot be answered: the checkpoint's tokenizer_config.json is not JSON"
    for _ in range(600):
        if said in serving.output():
            break
        time.sleep(0.1)
    assert serving.output().count(said) == 1
    assert serving.complete()["choices"][0]["text"]
    status, answer, _ = serving.request(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}
    )
    assert (status, answer["error"]["code"]) == (500, "bad_checkpoint")


def test_a_missing_tensor(start: Start, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers + 1}))
    refused(start("--model", copy), f"layers.{layers}.", "Weights.Mismatch")


def test_too_little_memory(start: Start, copy: Path) -> None:
    refused(start("--model", copy, "--memory-limit-mb", "1"), "Weights.TooLarge")


def test_a_port_in_use(start: Start, example: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused(start("--model", example, "--port", port), port, "Config.Invalid")


def test_a_bad_flag(start: Start, example: Path) -> None:
    refused(start("--model", example, env={"MEDUSA_MAX_MODEL_LEN": "many"}), "MEDUSA_MAX_MODEL_LEN", "many")


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        ("import not_there", "handle", "not_there"),
        ("def other(request): ...", "handle", "other"),
        ("def handle(:", "handle", "handler.py"),
    ],
)
def test_a_handler_that_does_not_import(start: Start, tmp_path: Path, source: str, name: str, expected: str) -> None:
    (tmp_path / "handler.py").write_text(source)
    serving = start("--handler", f"{tmp_path}/handler.py:{name}")
    assert serving.wait_gone(timeout_s=120) != 0
    assert expected in serving.output()
    assert "Handler.NotFound" in serving.output()


@pytest.mark.parametrize("limit", ["-n 16", "-n 40"])
def test_too_few_open_files(start: Start, example: Path, limit: str) -> None:
    wrapper = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh"]
    refused(start("--model", example, wrapper=wrapper), "ulimit -n", limit.split()[1], "Limit.Reached")


def test_a_length_without_room_for_an_answer(start: Start, example: Path) -> None:
    refused(start("--model", example, "--max-model-len", "1"), "--max-model-len", "2 or more", "Config.Invalid")


def test_quantized_weights(start: Start, copy: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.to(torch.int8) for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    refused(start("--model", copy), "quantized", "I8", "Weights.Mismatch")


def test_nothing_to_serve(start: Start) -> None:
    refused(start(), "--model", "--handler")
