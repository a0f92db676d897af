"""LoRA adapters of a served model: by name in requests, from a store, loaded and unloaded while it serves."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from adapter_fixtures import merge, write_adapter
from engine_fixtures import fill_region, serve_region
from slow_origin import SlowOrigin, serving_origin
from waiting import until

from ..conftest import Serving

pytestmark = pytest.mark.forked

__all__ = ["serve_region"]  # a fixture

PROMPT = "This function returns"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, example: Path) -> Path:
    """Adapters of the example, and one whose rank is not what its config says."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three", "broken")):
        write_adapter(folder / name, example, seed=seed, rank=3 if name == "broken" else 4)
    shutil.copy(folder / "one" / "adapter_config.json", folder / "broken")
    return folder


@pytest.fixture(scope="module")
def origin(folder: Path) -> Iterator[SlowOrigin]:
    with serving_origin(folder, bytes_per_s=1e9) as server:
        yield server


@pytest.fixture(scope="module")
def serving(start_shared: Callable[..., Serving], folder: Path, origin: SlowOrigin, example: Path) -> Serving:
    names = ",".join(
        (
            *(f"one={origin.url}/one", f"two={folder / 'two'}", f"broken={folder / 'broken'}"),
            *("gone=/no/where", "away=http://127.0.0.1:9/away"),
        )
    )
    return start_shared(
        "--model", example, "--dtype", "float32", "--lora-modules", names, "--max-loras", "2", "--allow-lora", folder
    )  # fmt: skip


def text(serving: Serving, model: str, **body: Any) -> str:
    return str(serving.complete(PROMPT, model=model, max_tokens=12, **body)["choices"][0]["text"])


def failure(serving: Serving, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    status, answer, _ = serving.request("POST", path, body)
    return status, answer["error"]["code"], answer["error"]["message"]


def loaded(serving: Serving) -> int:
    (line,) = [
        line
        for line in serving.request("GET", "/metrics")[1].decode().splitlines()
        if line.startswith("medusa_engine_adapters{")
    ]
    return int(float(line.rpartition(" ")[2]))


def test_an_adapter_is_a_model_of_its_own(
    serving: Serving, serve_region: Callable[..., Any], folder: Path, example: Path, tmp_path: Path
) -> None:
    base = serving.complete(PROMPT, max_tokens=12)
    found = {name: text(serving, name) for name in ("one", "two")}
    for name, said in found.items():
        merged = serve_region(fill_region(merge(tmp_path / name, example, folder / name)), dtype="float32")
        assert said == merged.ask(PROMPT, ignore_eos=False).text
        assert said != base["choices"][0]["text"]
    answer = serving.complete(PROMPT, model="two")
    assert answer["model"] == "two"
    models = {model["id"]: model for model in serving.request("GET", "/v1/models")[1]["data"]}
    assert list(models) == [base["model"], "one", "two", "broken", "gone", "away"]
    assert models["one"]["parent"] == base["model"]
    assert models[base["model"]]["parent"] is None
    assert serving.request("GET", "/v1/models/two")[1]["id"] == "two"


def test_one_batch_has_several_adapters_and_the_base(serving: Serving) -> None:
    names = ["one", "two", "pydoc-lm"] * 3
    alone = [text(serving, name) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(lambda name: text(serving, name), names)) == alone


def test_what_cannot_be_used_is_one_clear_error(serving: Serving) -> None:
    for _ in range(2):
        status, code, message = failure(serving, "/v1/completions", {"model": "broken", "prompt": PROMPT})
        assert (status, code) == (400, "bad_request")
        assert "down_proj.lora_A.weight: expected [4, 512], found [3, 512]" in message
    status, code, message = failure(serving, "/v1/completions", {"model": "gone", "prompt": PROMPT})
    assert (status, code) == (404, "model_not_found"), "its place is known, and nothing is there"
    assert message.startswith('the model "gone" does not exist: expected adapter_model.safetensors or adapter_model')
    status, code, message = failure(serving, "/v1/completions", {"model": "away", "prompt": PROMPT})
    assert (status, code) == (503, "Storage.Unreachable"), "its store may come back"
    status, code, message = failure(serving, "/v1/completions", {"model": "nobody", "prompt": PROMPT})
    assert (status, code) == (404, "model_not_found")
    assert 'this server has "pydoc-lm", "one", "two"' in message
    status, _, message = failure(serving, "/v1/embeddings", {"model": "one", "input": "a"})
    assert status == 400
    assert "adapters continue text" in message
    assert serving.complete(PROMPT)["choices"][0]["text"]


def test_one_that_is_not_in_use_goes_for_another(serving: Serving, origin: SlowOrigin) -> None:
    said = text(serving, "one")
    text(serving, "two")
    before = len(origin.ranges)
    assert text(serving, "one") == said
    assert len(origin.ranges) == before, "it was there"
    failure(serving, "/v1/completions", {"model": "broken", "prompt": PROMPT})
    text(serving, "two")
    assert text(serving, "one") == said
    assert len(origin.ranges) > before, "it was fetched again"
    assert loaded(serving) == 2


def test_adapters_are_loaded_and_unloaded_while_it_serves(serving: Serving, folder: Path, tmp_path: Path) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    given = {"lora_name": "three", "lora_path": str(folder / "three")}
    status, answer, _ = serving.request("POST", load, given)
    assert (status, answer) == (200, b"Success: LoRA adapter 'three' added successfully.")
    said = text(serving, "three")
    assert said != text(serving, "one")
    assert failure(serving, load, given)[0] == 400
    status, answer, _ = serving.request("POST", load, given | {"lora_path": str(folder / "one"), "load_inplace": True})
    assert status == 200, answer
    assert text(serving, "three") == text(serving, "one")
    assert failure(serving, load, given | {"lora_path": str(folder / "broken"), "load_inplace": True})[0] == 400
    assert text(serving, "three") == text(serving, "one"), "the one before it stays"
    assert serving.request("POST", unload, {"lora_name": "three"})[0] == 200
    assert failure(serving, "/v1/completions", {"model": "three", "prompt": PROMPT})[:2] == (404, "model_not_found")
    assert failure(serving, unload, {"lora_name": "three"})[0] == 404
    status, answer, _ = serving.request("POST", load, {"lora_name": "x", "lora_path": str(folder / "nowhere")})
    assert (status, answer["error"]["param"]) == (404, "lora_path")
    status, code, message = failure(serving, load, {"lora_name": "x", "lora_path": str(tmp_path)})
    assert (status, code) == (403, "not_allowed")
    assert f"--allow-lora={tmp_path}" in message


def test_functions_of_a_node_fetch_an_adapter_once(
    start: Callable[..., Serving], start_node: Callable[..., Any], folder: Path, example: Path
) -> None:
    node = start_node("--prewarm", "torch=1")
    with serving_origin(folder, bytes_per_s=1e9) as store:
        names = f"one={store.url}/one,two={folder / 'two'}"
        said = []
        for _ in range(2):
            node.wait_warm()
            function = start("--model", example, "--node-socket", node.socket, "--lora-modules", names)
            said.append([text(function, name) for name in ("one", "two", "pydoc-lm")])
            assert set(function.children().values()) == {"function", "worker", "templates"}, "the engine is the agent's"
        size = (folder / "one" / "adapter_model.safetensors").stat().st_size
        assert store.sent < size + (260 << 10), "the header's first read of 256 KiB, and the weights once"
        regions = {region["url"].rpartition("/")[0]: region for region in node.status()["regions"]}
        assert regions[f"{store.url}/one"]["in_use_by"] == 2
    assert said[0] == said[1]
    assert len(set(said[0])) == 3


def test_an_engine_that_comes_after_a_crash_has_the_adapters(
    start: Callable[..., Serving], folder: Path, example: Path
) -> None:
    function = start("--model", example, "--lora-modules", f"one={folder / 'one'}")
    said = text(function, "one")
    os.kill(function.child("engine"), signal.SIGKILL)
    until(lambda: function.request("POST", "/v1/completions", {"model": "one", "prompt": "A"})[0] == 200)
    assert text(function, "one") == said


def test_the_base_does_not_wait_and_one_in_use_stays(
    start: Callable[..., Serving], folder: Path, example: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(folder / "two" / "adapter_config.json", pickled)
    torch.save(load_file(folder / "two" / "adapter_model.safetensors"), pickled / "adapter_model.bin")
    with serving_origin(folder, bytes_per_s=1.5e5) as store, ThreadPoolExecutor(2) as pool:  # seconds
        names = f"one={store.url}/one,two={pickled},same={folder / 'two'}"
        function = start("--model", example, "--lora-modules", names, "--max-loras", "1")
        first = pool.submit(text, function, "one", ignore_eos=True)
        assert function.complete(PROMPT)["choices"][0]["text"]
        assert not first.done(), "the base's answer came before its adapter had"
        said = first.result()
        long = pool.submit(function.complete, PROMPT, model="one", max_tokens=400, ignore_eos=True)
        until(lambda: running(function) > 0)
        other = text(function, "two")
        assert long.done(), "the only place was taken as long as the adapter in it was used"
        assert long.result()["choices"][0]["text"].startswith(said)
        assert text(function, "same") == other
    assert loaded(function) == 1


def running(serving: Serving) -> int:
    lines = serving.request("GET", "/metrics")[1].decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("medusa_engine_running{"))
