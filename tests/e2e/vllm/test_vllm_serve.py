"""`medusa serve --engine vllm`: routes, streams, cancellation, handlers and faults, as with the torch engine."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

Start = Callable[..., Any]
PATIENCE_S = 300.0  # vLLM is imported in every one of these, on slow cores beside other work
FUNCTIONS = Path(__file__).parents[2] / "functions"
QUANTIZED = Path(__file__).parents[2] / "vllm" / "quantized.py"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


def complete(serving: Any, prompt: Any = "Return the", **body: Any) -> tuple[int, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0} | body
    status, answer, _ = serving.request("POST", "/v1/completions", body, timeout_s=PATIENCE_S)
    return status, answer


def stage_names(serving: Any) -> set[str]:
    return {stage["name"] for stage in serving.request("GET", "/timeline")[1]["stages"]}


def test_it_answers_as_the_torch_engine_does(start: Start, example: Path) -> None:
    torch_engine = start("--model", example)
    expected = torch_engine.complete("Return the", max_tokens=8)
    assert torch_engine.stop() == 0
    serving = start("--model", example, "--engine", "vllm", "--kv-cache-mb", "64")
    status, answer = complete(serving)  # sent while vLLM is being imported: held, and answered
    assert status == 200, answer
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert answer["usage"] == expected["usage"]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", timeout=PATIENCE_S)
    model = client.models.list().data[0].id
    pieces = client.completions.create(model=model, prompt="Return the", max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == answer["choices"][0]["text"]
    messages = [{"role": "user", "content": "What does len return?"}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0)
    assert chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=model, prompt="x", max_tokens=-1)
    client.close()
    stopped = complete(serving, stop=[answer["choices"][0]["text"][3:6]])[1]["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert answer["choices"][0]["text"].startswith(stopped["text"])
    assert {"import", "config", "kv_plan", "skeleton", "apply", "first_forward", "first_token"} <= stage_names(serving)
    assert serving.stop() == 0


def test_prompts_that_begin_alike_are_found_under_the_same_salt(start: Start, example: Path) -> None:
    given = ("--model", example, "--engine", "vllm", "--kv-cache-mb", "64")
    long: dict[str, Any] = {"prompt": [5] * 300, "max_tokens": 2}
    for flags, expected in (((), [False, True, False]), (("--prefix-cache-mb", "0"), [False, False, False])):
        serving = start(*given, *flags)
        found = [complete(serving, **long, cache_salt=salt)[1]["usage"] for salt in ("a", "a", "b")]
        assert [used["prompt_tokens_details"]["cached_tokens"] > 0 for used in found] == expected
        assert serving.stop() == 0


def test_structured_outputs_and_forced_calls_are_vllms_own(start: Start, example: Path) -> None:
    serving = start("--model", example, "--engine", "vllm", "--kv-cache-mb", "64")
    properties = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    parameters = {**properties, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    status, answer = complete(serving, max_tokens=40, structured_outputs={"regex": "[a-f]{3}[0-9]"})
    assert status == 200, answer
    assert re.fullmatch("[a-f]{3}[0-9]", answer["choices"][0]["text"])
    assert complete(serving, structured_outputs={"choice": ["maybe", "never"]})[1]["choices"][0]["text"] in (
        "maybe", "never",
    )  # fmt: skip
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert len(json.loads(complete(serving, max_tokens=40, response_format=form)[1]["choices"][0]["text"])) == 2
    chat = {"messages": [{"role": "user", "content": "?"}], "tools": [tool], "tool_choice": "required",
            "parallel_tool_calls": False, "max_tokens": 80}  # fmt: skip
    choice = serving.request("POST", "/v1/chat/completions", chat, timeout_s=PATIENCE_S)[1]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["n"] in (1, 2)
    status, answer = complete(serving, structured_outputs={"regex": "["})
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")
    assert complete(serving)[0] == 200
    assert serving.stop() == 0


def test_a_lost_client_ends_its_request_and_a_killed_engine_is_replaced(start: Start, example: Path) -> None:
    serving = start("--model", example, "--engine", "vllm", "--kv-cache-mb", "64")
    assert complete(serving)[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=PATIENCE_S)
    body = {"prompt": "Return the", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data:")
    connection.close()
    deadline = time.monotonic() + PATIENCE_S
    while serving.metric("medusa_engine_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert serving.metric("medusa_engine_running") == 0
    os.kill(serving.child("engine"), signal.SIGKILL)
    assert complete(serving)[0] == 200  # by a new engine, forked from the same zygote
    assert serving.stop() == 0


def test_a_handler_gets_the_same_model(start: Start, example: Path) -> None:
    handler = f"{FUNCTIONS / 'model' / 'handler.py'}:Handler"
    serving = start("--model", example, "--engine", "vllm", "--kv-cache-mb", "64", "--handler", handler)
    status, answer, _ = serving.request("POST", "/", {"prompt": "Return the", "max_tokens": 4}, timeout_s=PATIENCE_S)
    assert status == 200, answer
    assert answer["answer"]
    assert serving.stop() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, r"NoSuchForCausalLM.*\[Model.Unsupported\]"),
        ({"num_labels": 10**6}, r"num_labels to be at most 100000, found 1000000 \[Config.Invalid\]"),
    ],
    ids=str,
)
def test_what_vllm_cannot_serve_is_refused_in_one_line(
    start: Start, example: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(example, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    serving = start("--model", copy, "--engine", "vllm")
    assert serving.process.wait(PATIENCE_S) != 0
    assert re.search(message, serving.output()), serving.output()
    assert "Traceback" not in serving.output()


def test_a_quantization_without_kernels_here_is_told_in_one_line(start: Start, tmp_path: Path) -> None:
    if "avx512" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has the kernels")
    spec = importlib.util.spec_from_file_location("quantized", QUANTIZED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    serving = start("--model", module.write_checkpoint(tmp_path, "awq"), "--engine", "vllm")
    assert complete(serving, [3, 4, 5])[0] >= 500
    assert serving.process.wait(PATIENCE_S) != 0
    assert "Model.Unsupported" in serving.output()
    assert "AVX-512" in serving.output()


def test_a_node_gives_an_engine_that_has_imported_and_rehearsed(start: Start, start_node: Start, example: Path) -> None:
    node = start_node("--prewarm", "vllm=1")
    deadline = time.monotonic() + PATIENCE_S
    while not (engines := node.status()["engines"]["vllm"])["warm"] and time.monotonic() < deadline:
        assert engines["failure"] is None, node.output()
        time.sleep(0.1)
    (warm,) = node.status()["engines"]["vllm"]["pids"]
    serving = start(
        "--model", example, "--engine", "vllm", "--kv-cache-mb", "64", env={"MEDUSA_NODE_SOCKET": node.socket}
    )
    status, answer = complete(serving)
    assert status == 200, answer
    assert answer["choices"][0]["text"]
    stages = serving.request("GET", "/timeline")[1]["stages"]
    assert warm in [stage["detail"].get("pid") for stage in stages]
    assert not [stage for stage in stages if stage["name"] == "import" and stage["detail"].get("engine")]
    assert serving.stop() == 0
