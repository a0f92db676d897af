"""Our description of our routes, and requests made up from it by schemathesis."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
PLACES = [
    {"MEDUSA_PLATFORM": "local"},
    {"MEDUSA_PLATFORM": "kserve"},
    {"SAGEMAKER_REGION": "eu-west-1"},
    {"fprocess": "x", "suppress_lock": "1"},
]


@pytest.mark.parametrize("env", PLACES)
def test_the_description_has_the_platforms_own_routes(launch: Launch, env: dict[str, str]) -> None:
    instance = launch(handler="function/handler.py", metrics_port="0", **env)
    document = instance.request("GET", "/openapi.json").json
    assert document["openapi"] == "3.1.0"
    assert {"/", "/livez", "/readyz", "/startupz", "/health", "/metrics", "/timeline", "/openapi.json"} <= set(
        document["paths"]
    )
    assert ("/ping" in document["paths"]) is ("SAGEMAKER_REGION" in env)
    assert ("/_/health" in document["paths"]) is ("fprocess" in env)
    assert ({"/v2", "/v2/models/{name}", "/v2/models/model/infer"} <= set(document["paths"])) is (
        "kserve" in env.values()
    )
    assert "/v1/completions" not in document["paths"]


def test_other_methods_of_the_servers_own_paths_are_none_of_the_functions(launch: Launch) -> None:
    instance = launch(handler="function/handler.py", fprocess="x", suppress_lock="1", metrics_port="0")
    for path in ("/livez", "/_/health", "/metrics", "/timeline", "/openapi.json"):
        for method in ("PUT", "POST", "DELETE", "PATCH", "TRACE"):
            answer = instance.request(method, path, b'{"name": "a"}')
            assert answer.status == 405, (method, path)
            assert {"GET", "HEAD"} <= set(answer.headers["allow"].split(", ")) <= {"GET", "HEAD", "OPTIONS"}
        head = instance.request("HEAD", path)
        assert (head.status, head.body) == (200, b"")
    assert instance.request("OPTIONS", "/metrics").headers["allow"] == "GET, HEAD, OPTIONS"
    assert "WARNING" not in instance.output()


def test_only_what_the_model_can_do_is_described(launch: Launch) -> None:
    paths = launch("--model", str(EXAMPLE), MEDUSA_PLATFORM="local").request("GET", "/openapi.json").json["paths"]
    assert "/v1/completions" in paths
    assert "/v1/embeddings" not in paths
    hosting = launch(SAGEMAKER_MULTI_MODEL="true").request("GET", "/openapi.json").json["paths"]
    assert {"/models", "/models/{name}", "/models/{name}/invoke"} <= set(hosting)
    assert not {"/", "/invocations"} & set(hosting)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("env", [{"K_SERVICE": "f"}, PLACES[2]])
def test_made_up_requests_to_a_function_break_nothing(launch: Launch, env: dict[str, str]) -> None:
    instance = launch("--max-body-mb", "1", handler="function/handler.py:anything", metrics_port="0", **env)
    _fuzz(instance, "--checks", "all", "--max-examples", "10")


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("env", PLACES[:2])
def test_made_up_requests_to_a_model_break_nothing(launch: Launch, env: dict[str, str]) -> None:
    instance = launch("--model", str(EXAMPLE), "--max-model-len", "128", "--max-body-mb", "1", **env)
    # Not that every valid request is accepted: a prompt may be too long for the model.
    _fuzz(instance, "--checks", "all", "--exclude-checks", "positive_data_acceptance", "--max-examples", "5")


def _fuzz(instance: Any, *arguments: str) -> None:
    pytest.importorskip("schemathesis", reason="fuzzing needs schemathesis")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{instance.port}/openapi.json"]
    found = subprocess.run(
        [*command, *arguments, "--seed", "1", "--phases", "examples,coverage,fuzzing"],
        capture_output=True, text=True, cwd=instance.folder, timeout=400, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert "Traceback" not in instance.output()
    assert instance.request("GET", "/readyz").status == 200
