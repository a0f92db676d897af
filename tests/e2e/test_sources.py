"""The same model out of other places: shards over HTTP and S3, one file by its URL, and GGUF, give the same tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from slow_origin import SlowOrigin, serving_origin

pytestmark = pytest.mark.forked

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def sharded(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in three shards, its tensors dealt out in turn."""
    folder = Path(shutil.copytree(example, tmp_path_factory.mktemp("sharded") / "model"))
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    weight_map = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for shard in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def expected(example: Path) -> Any:
    """What the model says from its own folder; filled by the first test that asks."""
    return {}


def says(start: Start, *arguments: str | Path, **env: str) -> Any:
    serving = start("--model", *arguments, env=env)
    choices = serving.complete(max_tokens=20)["choices"]
    assert serving.stop() == 0
    return choices


@pytest.fixture
def reference(start: Start, example: Path, expected: dict[str, Any]) -> Any:
    if not expected:
        expected["choices"] = says(start, example)
    return expected["choices"]


@pytest.fixture
def origin(sharded: Path) -> Iterator[SlowOrigin]:
    with serving_origin(sharded, bytes_per_s=1e9) as server:
        yield server


@pytest.fixture(scope="module")
def bucket(sharded: Path, example: Path) -> Iterator[str]:
    """An S3 with both forms of the model; yields its endpoint."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    boto3 = pytest.importorskip("boto3")
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=endpoint, **keys)
    client.create_bucket(Bucket="models")
    for folder, prefix in ((sharded, "sharded"), (example, "whole")):
        for path in folder.iterdir():
            client.upload_file(str(path), "models", f"{prefix}/{path.name}")
    client.close()
    yield endpoint
    server.stop()


def test_shards_over_http(start: Start, origin: SlowOrigin, reference: Any) -> None:
    assert says(start, origin.url) == reference


def test_shards_from_s3(start: Start, bucket: str, reference: Any) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": bucket}
    assert says(start, "s3://models/sharded", **keys) == reference


def test_one_file_from_s3(start: Start, bucket: str, reference: Any) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": bucket}
    assert says(start, "s3://models/whole/model.safetensors", **keys) == reference


def test_one_file_over_http(start: Start, example: Path, reference: Any) -> None:
    with serving_origin(example, bytes_per_s=1e9) as server:
        assert says(start, server.url + "/model.safetensors") == reference


def test_a_gguf_file_in_two_parts_has_all_that_a_folder_has(
    start: Start, example: Path, tmp_path: Path, reference: Any
) -> None:
    from gguf_files import write_gguf
    from gguf_vocabulary import gguf_metadata
    from tokenizers import Tokenizer

    tokenizer = gguf_metadata(Tokenizer.from_file(str(example / "tokenizer.json")), "gpt2", pre="gpt-2")
    first = write_gguf(example, tmp_path / "m.gguf", "BF16", parts=2, **tokenizer)
    with serving_origin(tmp_path, bytes_per_s=1e9) as server:
        assert says(start, f"{server.url}/{first.name}") == reference


def test_a_shard_that_is_missing_is_named(start: Start, sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    (folder / "model-1.safetensors").unlink()
    with serving_origin(folder, bytes_per_s=1e9) as server:
        serving = start("--model", server.url)
        assert serving.wait_gone() == 1
    assert "model-1.safetensors" in serving.output()
    assert "Storage.NotFound" in serving.output()
    assert "Traceback" not in serving.output()
