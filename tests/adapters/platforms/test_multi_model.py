"""SageMaker's multi-model API: real models loaded, invoked and unloaded by request."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.platforms.multi_model import LoadedModel, ModelHost
from medusa_handler.contract import Headers, HttpError, Request
from medusa_runtime.config import Settings
from process_tree import alive, descendants

Launch = Callable[..., Any]
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
BODY = {"prompt": "This function returns", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def host(launch: Launch) -> Any:
    return launch("--served-model-name", "told", SAGEMAKER_MULTI_MODEL="true", MEDUSA_THREADS="1")


def test_models_come_and_go(host: Any, tmp_path: Path) -> None:
    assert host.request("GET", "/ping").status == 200
    assert host.request("GET", "/models").json == {"models": []}
    shutil.copytree(EXAMPLE, tmp_path / "model")
    (tmp_path / "function" / "code").mkdir(parents=True)
    (tmp_path / "function" / "code" / "handler.py").write_text("def handle(request): return {'got': request.text}\n")

    loaded = host.request("POST", "/models", {"model_name": "words", "url": str(tmp_path / "model")})
    assert (loaded.status, loaded.json["modelName"]) == (200, "words")
    assert host.request("POST", "/models", {"model_name": "words", "url": str(tmp_path / "model")}).status == 409
    assert host.request("POST", "/models", {"model_name": "code", "url": str(tmp_path / "function")}).status == 200
    assert [model["modelName"] for model in host.request("GET", "/models").json["models"]] == ["words", "code"]

    answer = host.request("POST", "/models/words/invoke", BODY).json
    assert answer["choices"][0]["text"]
    assert answer["model"] == "told"  # by a flag of the host
    stream = host.request("POST", "/models/words/invoke", BODY | {"stream": True})
    assert stream.body.endswith(b"data: [DONE]\n\n")
    assert host.request("POST", "/models/code/invoke", b"x", Content_Type="text/plain").json == {"got": "x"}
    assert host.request("POST", "/models/code/invoke", b"x", Content_Type="text/plain", Accept="a/b").status == 406

    before = descendants(host.process.pid)
    assert host.request("DELETE", "/models/words").status == 200
    assert host.request("DELETE", "/models/words").status == 404
    assert host.request("GET", "/models/words").status == 404
    assert host.request("POST", "/models/words/invoke", BODY).status == 404
    assert len(descendants(host.process.pid)) < len(before)

    left = descendants(host.process.pid)
    os.kill(host.process.pid, signal.SIGKILL)
    host.process.wait(120)
    for _ in range(3000):
        if not any(alive(pid) for pid in left):
            break
        signal.sigtimedwait([], 0.02)
    assert not any(alive(pid) for pid in left)


def test_models_that_cannot_be_loaded(host: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken" / "code").mkdir(parents=True)
    (tmp_path / "broken" / "code" / "handler.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "huge").mkdir()
    with open(tmp_path / "huge" / "model.safetensors", "wb") as file:
        file.truncate(1 << 50 if os.statvfs(tmp_path).f_bsize > 1 << 12 else 1 << 43)
    for body, status in (
        ({"model_name": "a", "url": str(tmp_path / "empty")}, 400),
        ({"model_name": "a", "url": str(tmp_path / "broken")}, 500),
        ({"model_name": "a", "url": str(tmp_path / "nowhere")}, 400),
        ({"model_name": "../a", "url": str(tmp_path / "empty")}, 400),
        ({"model_name": "a", "url": str(tmp_path / "huge")}, 507),
        ({"url": "x"}, 400),
        ({"model_name": 3, "url": "x"}, 400),
    ):
        answer = host.request("POST", "/models", body)
        assert answer.status == status, answer.body
        assert answer.json["error"]
    assert host.request("POST", "/models", {"url": "x"}).json["error"]["message"].endswith("'-', found nothing")
    assert host.request("POST", "/models", b"{").status == 400
    assert host.request("GET", "/models").json == {"models": []}
    assert host.request("POST", "/invocations", b"{}").status == 404
    host.terminate()
    assert host.process.wait(60) == 0


def invoke(models: ModelHost) -> Any:
    return models._invoke(Request("POST", "/models/a/invoke", Headers([]), {}, b"{}", "id"), "a")


def test_an_instance_that_hangs_is_reported() -> None:
    models = ModelHost(Settings(timeout_s=0.2), {})
    with socket.create_server(("127.0.0.1", 0)) as silent, subprocess.Popen(["sleep", "100"], text=True) as process:
        models._loaded["a"] = LoadedModel("/m", process, silent.getsockname()[1], ready=True)
        with pytest.raises(HttpError, match=r"did not answer within 0\.2 s") as caught:
            invoke(models)
        assert caught.value.status == 504
        process.kill()


def test_of_two_that_unload_a_model_one_is_told_that_it_is_not_there() -> None:
    models, found = ModelHost(Settings(), {}), []
    with subprocess.Popen(["sleep", "100"], text=True) as process:
        models._loaded["a"] = LoadedModel("/m", process, 1, ready=True)
        with pytest.raises(HttpError) as caught:
            invoke(models)  # nothing listens there
        assert caught.value.status == 503
        both = threading.Barrier(2)
        find = models._find

        def find_together(name: str) -> LoadedModel:
            model = find(name)
            try:
                both.wait(0.5)  # as far as nothing excludes it, both have found the model now
            except threading.BrokenBarrierError:
                pass
            return model

        models._find = find_together  # type: ignore[method-assign]

        def unload() -> None:
            try:
                models.unload("a")
                found.append(200)
            except HttpError as error:
                found.append(error.status)

        threads = [threading.Thread(target=unload) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(found) == [200, 404]


def test_a_request_for_a_model_that_is_unloaded_meanwhile_does_not_find_it() -> None:
    models = ModelHost(Settings(), {})
    with subprocess.Popen(["sleep", "100"], text=True) as process:
        model = LoadedModel("/m", process, 1, ready=True)
        answers = iter([model])
        find = models._find
        models._find = lambda name: next(answers, None) or find(name)  # type: ignore[method-assign]
        with pytest.raises(HttpError) as caught:
            invoke(models)
        assert caught.value.status == 404
        process.kill()
