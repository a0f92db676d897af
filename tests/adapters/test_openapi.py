"""Our description of our routes, and requests made up from it by schemathesis."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"
PLACES = [{"MEDUSA_PLATFORM": "local"}, {"SAGEMAKER_REGION": "eu-west-1"}, {"fprocess": "x", "suppress_lock": "1"}]


@pytest.mark.parametrize("env", PLACES)
def test_the_description_has_the_platforms_own_routes(launch: Launch, env: dict[str, str]) -> None:
    instance = launch(handler="function/handler.py", metrics_port="0", **env)
    document = instance.request("GET", "/openapi.json").json
    assert document["openapi"] == "3.1.0"
    assert {"/", "/livez", "/readyz", "/startupz", "/metrics", "/timeline", "/openapi.json"} <= set(document["paths"])
    assert ("/ping" in document["paths"]) is ("SAGEMAKER_REGION" in env)
    assert ("/_/health" in document["paths"]) is ("fprocess" in env)
    assert "/v1/completions" not in document["paths"]


@pytest.mark.slow
def test_made_up_requests_break_nothing(launch: Launch) -> None:
    pytest.importorskip("schemathesis", reason="fuzzing needs schemathesis")
    instance = launch("--model", str(EXAMPLE), "--max-model-len", "128", "--max-body-mb", "1", MEDUSA_PLATFORM="local")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{instance.port}/openapi.json"]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    found = subprocess.run(
        [*command, "--checks", checks, "--max-examples", "25", "--seed", "1", "--phases", "examples,coverage,fuzzing"],
        capture_output=True, text=True, cwd=instance.folder, timeout=100, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert "Traceback" not in instance.output()
    assert instance.request("GET", "/readyz").status == 200
