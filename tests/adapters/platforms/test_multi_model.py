"""SageMaker's multi-model API: real models loaded, invoked and unloaded by request."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
    assert host.request("POST", "/models", b"{").status == 400
    assert host.request("GET", "/models").json == {"models": []}
    assert host.request("POST", "/invocations", b"{}").status == 404
    host.terminate()
    assert host.process.wait(60) == 0
