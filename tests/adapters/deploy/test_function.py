"""What `medusa deploy` says about a function's model, on any platform."""

from __future__ import annotations

import pytest
from deploying import deploy, refused


@pytest.mark.parametrize("model", ["./folder", "/models/qwen", "file:///models/qwen", "org/name"])
@pytest.mark.parametrize("platform", ["knative", "cloudrun", "helm"])
def test_a_folder_that_only_this_machine_may_have_is_pointed_at(platform: str, model: str) -> None:
    done = deploy(platform, "qwen", "--image=example/qwen:1", f"--model={model}")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"medusa: MEDUSA_MODEL={model} is a path in the container, into which this command copies")


def test_an_address_that_no_store_reads_is_pointed_at() -> None:
    done = deploy("knative", "qwen", "--image=qwen:1", "--model=htps://host/qwen")
    assert (done.returncode, "unknown scheme htps://; expected one of" in done.stderr) == (0, True)
    assert not deploy("knative", "qwen", "--image=qwen:1", "--model=az://container/qwen").stderr


@pytest.mark.parametrize("platform", ["knative", "openfaas"])
@pytest.mark.parametrize("flag", ["--model", "--handler"])
def test_an_empty_model_or_handler_is_refused(platform: str, flag: str) -> None:
    for value in ("", " "):
        assert f"{flag}: expected " in refused(platform, "qwen", "--image=example/qwen:1", f"{flag}={value}")
