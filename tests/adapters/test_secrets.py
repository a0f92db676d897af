"""Secrets that a user may have put anywhere are in no answer, no log, no message and nothing that is deployed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import medusa_command
import pytest
from medusa_adapters.deploy.manifests import values
from medusa_runtime.errors import ConfigError
from medusa_runtime.storage.base import redacted

from benchmarks.ranged_server import RangedServer

MEDUSA = Path(sys.executable).with_name("medusa")
EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"
KEYS = {
    "AWS_ACCESS_KEY_ID": "HIDDEN1",
    "AWS_SECRET_ACCESS_KEY": "HIDDEN2",
    "AWS_SESSION_TOKEN": "HIDDEN3",
    "MEDUSA_TOKEN": "HIDDEN4",
}
SIGNED = "?X-Amz-Credential=HIDDEN5&X-Amz-Signature=HIDDEN6"


@pytest.fixture
def origin() -> Iterator[str]:
    """A server of the example that takes any user, password and query."""
    server = RangedServer(EXAMPLE.parent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://HIDDEN7:HIDDEN8@127.0.0.1:{server.server_port}/{EXAMPLE.name}"
    server.shutdown()
    server.server_close()


def medusa(*arguments: str) -> subprocess.CompletedProcess[str]:
    if arguments[0] in ("inspect", "deploy"):  # they only print
        return medusa_command.medusa(*arguments, environ=KEYS)
    return subprocess.run(
        [MEDUSA, *arguments], capture_output=True, text=True, env=os.environ | KEYS, timeout=240, check=False
    )


@pytest.mark.parametrize("level", ["info", "debug"])
def test_an_instance_tells_none(launch: Callable[..., Any], origin: str, level: str) -> None:
    instance = launch("--model", origin + SIGNED, MEDUSA_PLATFORM="local", MEDUSA_LOG_LEVEL=level, **KEYS)
    bearer = {"Authorization": f"Bearer {KEYS['MEDUSA_TOKEN']}"}
    told = instance.request("GET", "/readyz").body
    for path in ("/v1/models", "/timeline", "/metrics", "/openapi.json", "/nothing" + SIGNED):
        told += instance.request("GET", path, **bearer).body
    answer = instance.request("POST", "/v1/completions", {"prompt": "def", "max_tokens": 2}, **bearer)
    assert answer.status == 200
    for body in ({"prompt": "def", "model": "other"}, b'{"HIDDEN9"'):
        refused = instance.request("POST", "/v1/completions", body, **bearer)
        assert refused.status in (400, 404)
        told += refused.body
    assert b'"model": "pydoc-lm"' in told
    assert b"HIDDEN" not in told + answer.body
    assert "HIDDEN" not in instance.output()


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "{url}"),
        ("inspect", "{url}", "--json"),
        ("inspect", "{origin}/nothing" + SIGNED),
        ("inspect", "{origin}", "--state", "{origin}/nothing" + SIGNED),
        ("inspect", "http://HIDDEN7:HID/DEN8@127.0.0.1:1/m" + SIGNED),
        ("inspect", "http://HIDDEN7:HIDDEN8@[127.0.0.1/m" + SIGNED),
        ("fetch", "{origin}/nothing" + SIGNED),
        ("serve", "--port", "0", "--model", "{origin}/nothing" + SIGNED),
        ("serve", "--port", "0", "--token", "HIDDEN 4"),
        ("materialize", "--model", "{url}", "--starts", "0"),
        ("deploy", "knative", "f", "--image=f", "--model={url}"),
        ("deploy", "openfaas", "f", "--image=f", "--model={url}"),
        ("deploy", "knative", "f", "--image=f", "--env=MEDUSA_STATE={url}"),
        ("deploy", "knative", "f", "--image=f", "--env=MEDUSA_TOKEN HIDDEN4"),
        ("deploy", "knative", "f", "--image=f", "--timeline={url}"),
    ],
)
def test_a_command_prints_none(origin: str, arguments: tuple[str, ...]) -> None:
    done = medusa(*(each.format(origin=origin, url=origin + SIGNED) for each in arguments))
    assert "HIDDEN" not in done.stdout + done.stderr
    assert "DEN8" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout or done.stderr.startswith("medusa: ")


def test_a_value_that_is_deployed_readably_is_pointed_at() -> None:
    done = medusa("deploy", "knative", "f", "--image=f", "--env=HF_TOKEN=HIDDEN4")
    assert done.stderr == "medusa: HF_TOKEN: everybody who reads what is deployed sees the value\n"
    assert medusa("deploy", "knative", "f", "--image=f", "--env=HF_HOME=x").stderr == ""
    with pytest.raises(ConfigError, match=r"^--env cannot be used: expected NAME=VALUE, found a text without '='$"):
        values.variables(["HIDDEN"])


def test_redacted_keeps_what_is_no_secret() -> None:
    assert redacted("s3://bucket/models/m@v2") == "s3://bucket/models/m@v2"
    assert redacted("http://h:80/a@b:c/d") == "http://h:80/a@b:c/d"
    assert redacted("https://u:p@h/x?y#z") == "https://h/x"
    assert redacted("models/u:p@h?") == "models/u:p@h?"
