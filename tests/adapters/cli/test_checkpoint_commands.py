"""`medusa inspect` and `medusa fetch` on small real checkpoints, from folders and over HTTP."""

from __future__ import annotations

import functools
import http.server
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import medusa_command
import numpy as np
import pytest
from adapter_fixtures import write_adapter
from fork_server import MEDUSA_MAIN, ForkServer
from safetensors.numpy import load_file, save_file

from benchmarks.origin import Origin, Variant

MEDUSA = Path(sys.executable).with_name("medusa")
Medusa = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards of 12 MB together: several ranges a shard."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    shards: dict[str, dict[str, Any]] = {
        "model-1.safetensors": {"model.embed_tokens.weight": rng.random((600, 4096)).astype(np.float32)},
        "model-2.safetensors": {
            "lm_head.weight": rng.random((40, 4096)).astype(np.float32),
            "model.layers.0.mlp.up_proj.weight": rng.random((50, 4096)).astype(np.float16),
        },
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 4096, "vocab_size": 600}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def origin(model: Path) -> Iterator[str]:
    """The folder over HTTP, with ranges."""
    with Origin(model, model.parent / "origin", Variant("plain"), builtin=True) as served:
        yield served.url


@pytest.fixture
def medusa(fork_server: ForkServer) -> Medusa:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        if arguments[0] == "inspect":  # the other has a process that fetches
            return medusa_command.medusa(*arguments)
        return fork_server.run(MEDUSA_MAIN, list(map(str, arguments)))

    return run


def test_inspect_counts_parameters_and_bytes(model: Path, medusa: Medusa) -> None:
    found = json.loads(medusa("inspect", model, "--json").stdout)
    assert found["parameters"] == (600 + 40 + 50) * 4096
    assert found["parameters_by_dtype"] == {"F32": 640 * 4096, "F16": 50 * 4096}
    assert found["bytes"] == 640 * 4096 * 4 + 50 * 4096 * 2
    assert list(found["tensors"]) == [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    ]
    assert found["tensors"]["lm_head.weight"]["shard"] == "model-2.safetensors"


def test_inspect_says_what_an_adapter_is(tmp_path: Path, medusa: Medusa) -> None:
    example = Path(__file__).parents[3] / "examples" / "pydoc-lm"
    adapter = write_adapter(tmp_path / "sql", example, rank=6, targets=("q_proj", "v_proj"))
    text = medusa("inspect", adapter).stdout
    assert f"model    a LoRA adapter of rank 6 for q_proj, v_proj, of {example}" in text
    assert "runs     beside its base model: --lora-modules NAME=URL" in text
    assert "materialize" not in text  # an adapter has no state bundle
    found = json.loads(medusa("inspect", write_adapter(tmp_path / "dora", example, use_dora=True), "--json").stdout)
    assert "expected no use_dora (DoRA), found true" in found["backend"]["problem"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{kind}.weight" for kind in "AB")
    for name, (without, changed), said in (
        ("half", (b, {}), f"expected {b} beside its other matrix, found none"),
        ("rank", (a, {a: tensors[a][:4].copy()}), f"{a}: expected [6, 256], found [4, 256]"),
        ("other", (a, {"model.norm.weight": tensors[a]}), "found 'model.norm.weight'"),
    ):
        wrong = write_adapter(tmp_path / name, example, rank=6, targets=("q_proj", "v_proj"))
        kept = {key: value for key, value in tensors.items() if key != without}
        save_file(kept | changed, wrong / "adapter_model.safetensors")
        assert said in json.loads(medusa("inspect", wrong, "--json").stdout)["backend"]["problem"]
    assert "runs     beside" in medusa("inspect", tmp_path / "other", "--engine", "vllm").stdout  # it has more kinds
    refused = medusa("serve", "--model", adapter, "--port", "0")
    assert refused.returncode != 0
    assert f"expected --model {example} --lora-modules NAME=URL" in refused.stderr


def test_inspect_is_readable(model: Path, medusa: Medusa) -> None:
    text = medusa("inspect", model, "--tensors").stdout
    assert "LlamaForCausalLM" in text
    assert "1 layers, 4096 hidden, 600 vocabulary" in text
    assert "in 2 shards, 3 tensors" in text
    assert any(line.startswith("lm_head.weight") and "40×4096" in line for line in text.splitlines())
    assert medusa("inspect", "--model", model, "--tensors").stdout == text  # as it is named to serve and materialize


@pytest.mark.parametrize(
    "architectures", [5, [7], ["\x1b[2J"], ["\ud800"]], ids=["number", "numbers", "escape", "half"]
)
def test_inspect_shows_what_a_hostile_author_wrote_as_text(
    architectures: object, tmp_path: Path, medusa: Medusa
) -> None:
    save_file({"\x1b[2J\nfiles": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    (tmp_path / ".medusa").mkdir()
    (tmp_path / ".medusa" / "manifest.json").write_text(
        json.dumps({"schema": 1, "artifacts": [{"kind": "\ud800\x1b[2J"}]})
    )
    result = medusa("inspect", tmp_path, "--tensors")
    assert result.returncode == 0, result.stderr
    assert all(line.isprintable() for line in result.stdout.splitlines())
    assert "??[2J" in result.stdout
    assert "?[2J?files " in result.stdout


def test_inspect_shows_no_more_of_a_hostile_config_than_fits(tmp_path: Path, medusa: Medusa) -> None:
    save_file({"weight": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    config = {"architectures": ["a" * 10_000] * 1000, "hidden_size": "b" * 100_000, "vocab_size": [1] * 100_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = medusa("inspect", tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) < 10_000


def test_an_error_shows_what_a_hostile_author_wrote_as_text(tmp_path: Path, medusa: Medusa) -> None:
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["\\u001b[2J\\nmedusa: ready"]}')
    result = medusa("materialize", tmp_path)
    assert result.returncode != 0
    assert "the architecture ?[2J" in result.stderr
    assert "\x1b" not in result.stderr
    assert "\nmedusa: ready" not in result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_told_in_one_line(model: Path, unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [MEDUSA, "inspect", model], stdout=full, stderr=subprocess.PIPE, env=environment, text=True, timeout=60
        )
    assert result.returncode == 1
    assert result.stderr.startswith("medusa: there is no room left for the output: a disk")
    assert result.stderr.count("\n") == 1


def test_inspect_lists_no_tensors_where_there_are_none(tmp_path: Path, medusa: Medusa) -> None:
    save_file({}, tmp_path / "model.safetensors")
    result = medusa("inspect", tmp_path, "--tensors")
    assert result.returncode == 0, result.stderr
    assert "0 tensors" in result.stdout


def test_inspect_is_headed_by_what_it_was_asked_for(tmp_path: Path, medusa: Medusa) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1, np.float32)}, file)
    for given, title in ((file, str(file)), (tmp_path, str(tmp_path)), (f"file://{file}", f"file://{file}")):
        assert medusa("inspect", given).stdout.splitlines()[0] == title
        assert json.loads(medusa("inspect", given, "--json").stdout)["url"] == title


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected a checkpoint: medusa inspect URL, or --model URL [Config.Invalid]"),
        (("model", "--model", "model"), "expected one checkpoint, found 'model' and --model 'model'; leave one out"),
    ],
)
def test_inspect_wants_one_checkpoint(arguments: tuple[str, ...], said: str, medusa: Medusa) -> None:
    result = medusa("inspect", *arguments)
    assert result.returncode == 2
    assert said in result.stderr


def test_inspect_needs_no_weights(model: Path, origin: str, medusa: Medusa) -> None:
    remote = json.loads(medusa("inspect", origin, "--json").stdout)
    local = json.loads(medusa("inspect", model, "--json").stdout)
    assert remote["tensors"] == local["tensors"]


@pytest.mark.parametrize("where", ["folder", "http"])
def test_fetch_copies_every_byte(model: Path, origin: str, tmp_path: Path, where: str, medusa: Medusa) -> None:
    target = tmp_path / "copy"
    result = medusa("fetch", model if where == "folder" else origin, "--to", target)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in model.iterdir())
    for path in model.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()
    assert "fetched 10.9 MB in " in result.stdout


@pytest.mark.parametrize("name", ["config.json", "model-1.safetensors"])
@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "pipe"])
def test_a_fetch_writes_to_no_file_of_others(model: Path, tmp_path: Path, kind: str, name: str, medusa: Medusa) -> None:
    (target := tmp_path / "copy").mkdir()
    (secret := tmp_path / "secret").write_bytes(b"kept")
    part = target / f"{name}.part"
    {
        "symbolic link": lambda: part.symlink_to(secret),
        "hard link": lambda: part.hardlink_to(secret),
        "pipe": lambda: os.mkfifo(part),
    }[kind]()
    refused = medusa("fetch", model, "--to", target)
    assert (refused.returncode, "cannot be written" in refused.stderr) == (2, True), refused.stderr
    assert secret.read_bytes() == b"kept"
    part.unlink(missing_ok=True)
    part.write_bytes(b"left by a killed download" * 1000)
    (target / name).symlink_to(secret)
    assert medusa("fetch", model, "--to", target).returncode == 0
    assert secret.read_bytes() == b"kept"
    assert (target / name).read_bytes() == (model / name).read_bytes()


def test_a_failed_fetch_leaves_no_part_of_a_shard(model: Path, tmp_path: Path, medusa: Medusa) -> None:
    """The server has every header and small file, and loses one shard when its data is asked for."""

    class Losing(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            start = self.headers.get("Range", "bytes=0-")[6:].split("-")[0]
            path = model / self.path.strip("/")
            if not path.is_file() or (path.name == "model-2.safetensors" and int(start) > 0):
                self.send_error(404)
                return
            data = path.read_bytes()
            stop = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[1] or len(data) - 1)
            if path.name == "model-2.safetensors" and stop > 300_000:
                self.send_error(404)
                return
            body = data[int(start) : stop + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{int(start) + len(body) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"1"')
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Losing)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = medusa("fetch", f"http://127.0.0.1:{server.server_port}", "--to", tmp_path / "copy")
        server.shutdown()
    assert result.returncode == 1
    assert "model-2.safetensors" in result.stderr
    assert result.stderr.splitlines()[-1].endswith("[Storage.NotFound]")
    assert not (tmp_path / "copy").exists()


def test_a_disk_that_becomes_full_leaves_no_file_cut_short(model: Path, tmp_path: Path) -> None:
    """Where a part of the bytes has room, the kernel writes that part and reports no error."""
    most_bytes = 1 << 20
    copy = subprocess.run(
        [MEDUSA, "fetch", model, "--to", tmp_path / "copy"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert copy.returncode == 1, copy.stderr
    assert "cannot write" in copy.stderr
    assert "File too large" in copy.stderr
    assert not (tmp_path / "copy").exists()


def test_fetch_refuses_its_own_source_and_a_folder_it_cannot_write(model: Path, medusa: Medusa) -> None:
    own = medusa("fetch", model, "--to", model)
    assert (own.returncode, "another folder" in own.stderr) == (2, True)
    impossible = medusa("fetch", model, "--to", "/proc/nothing")
    assert (impossible.returncode, "/proc/nothing" in impossible.stderr) == (2, True)


@pytest.mark.parametrize("command", ["inspect", "fetch"])
def test_a_checkpoint_that_is_not_there(command: str, tmp_path: Path, medusa: Medusa) -> None:
    result = medusa(command, tmp_path / "none")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith("[Storage.NotFound]")


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that forbids everything."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/model"
        server.shutdown()


@pytest.mark.parametrize("command", ["inspect", "fetch"])
@pytest.mark.parametrize(
    ("url", "status", "code", "text"),
    [
        ("", 2, "Config.Invalid", "empty"),
        ("http://", 2, "Config.Invalid", "http(s)://host"),
        ("ht!tp://a:b@host/x?token=secret", 2, "Config.Invalid", "ht!tp://host/x: unknown scheme"),
        ("s3://", 2, "Config.Invalid", "no bucket"),
        ("http://127.0.0.1:1/model", 1, "Storage.Unreachable", "127.0.0.1 port 1"),
        ("{refusing}", 1, "Storage.Forbidden", "403"),
        ("{tmp}", 1, "Storage.NotFound", "model.safetensors"),
        ("{tmp}/readme.txt", 1, "Storage.NotFound", "found a file"),
    ],
)
def test_what_is_no_checkpoint_is_told_in_one_line(
    command: str, url: str, status: int, code: str, text: str, refusing: str, tmp_path: Path, medusa: Medusa
) -> None:
    (tmp_path / "readme.txt").write_text("hello")
    result = medusa(command, url.format(refusing=refusing, tmp=tmp_path))
    assert result.returncode == status
    *logged, line = result.stderr.splitlines()
    assert all(each.endswith("; trying again") for each in logged)
    assert line.startswith("medusa: ")
    assert line.endswith(f"[{code}]")
    assert text in line
    assert "secret" not in line


def test_fetch_into_memory(origin: str, medusa: Medusa) -> None:
    result = medusa("fetch", origin)
    assert result.returncode == 0, result.stderr
    assert "fetched 10.9 MB in " in result.stdout
    assert "into memory" in result.stdout


def test_a_truncated_shard_is_named(model: Path, medusa: Medusa) -> None:
    path = model / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    result = medusa("fetch", model)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "model-2.safetensors" in line
    assert line.endswith("[Weights.Corrupt]")
