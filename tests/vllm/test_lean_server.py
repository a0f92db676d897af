"""The lean import of vLLM's HTTP server, in processes of their own, as vLLM can be imported once."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from medusa_vllm.serving.lean_server import lean_server

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]

_SERVER = """
import contextlib, json, sys
from medusa_vllm.serving.lean_server import lean_server
from medusa_vllm.serving.arguments import server_arguments
with {context}:
    from vllm.entrypoints.launchers.app import build_app
    app = build_app(server_arguments([], "model"), ("generate",), None)
first = sum(name.partition(".")[0] == "openai" for name in sys.modules)
print(json.dumps({{"modules": first, "described": app.openapi()}}, sort_keys=True))
"""
_CLIENT = """
import json, sys
from medusa_vllm.serving.lean_server import lean_server
with lean_server():
    from openai.types.responses import Response, ResponseOutputMessage
    late = "openai._client" not in sys.modules
import openai, openai.types.responses as responses
from openai import OpenAI
from openai.types import *
from openai.types import responses as same
from openai.types.responses.response import Response as theirs
client = OpenAI(api_key="k", base_url="http://127.0.0.1:1")
message = ResponseOutputMessage.model_validate({
    "id": "m", "content": [{"type": "output_text", "text": "t", "annotations": []}], "role": "assistant",
    "status": "completed", "type": "message",
})
print(json.dumps([
    late, Response is theirs is responses.Response, same is responses, Completion.__module__, openai.__version__,
    type(client.responses).__module__, type(message.content[0]).__qualname__, openai.OpenAI is OpenAI,
]))
"""


def _run(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_app_is_the_same_with_half_of_openais_modules() -> None:
    lean, plain = (_run(_SERVER.format(context=one)) for one in ("lean_server()", "contextlib.nullcontext()"))
    assert lean["described"] == plain["described"]
    assert len(plain["described"]["paths"]) > 20
    assert lean["modules"] < plain["modules"] * 0.6


def test_other_code_gets_the_real_client_and_types() -> None:
    import openai

    late, *others = _run(_CLIENT)
    assert late
    assert others == [
        True, True, "openai.types.completion", openai.__version__, "openai.resources.responses.responses",
        "ResponseOutputText", True,
    ]  # fmt: skip


def test_another_pydantic_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from pydantic import BaseModel, TypeAdapter
    from pydantic._internal import _config

    with lean_server():

        class Late(BaseModel):
            number: int

        late = TypeAdapter(list[int] | None)

    assert not late.pydantic_complete
    assert late.validate_python(["7"]) == [7]
    assert not Late.__pydantic_complete__
    assert Late(number="7").number == 7  # type: ignore[arg-type]
    context = lean_server()
    with caplog.at_level(logging.INFO), monkeypatch.context() as another:
        another.delattr(_config, "ConfigWrapper")
        context.__enter__()
    with contextlib.closing(context.gen):  # type: ignore[attr-defined]

        class AtOnce(BaseModel):
            number: int

    assert AtOnce.__pydantic_complete__
    assert TypeAdapter(list[int]).pydantic_complete
    assert "without deferred validators" in caplog.text
