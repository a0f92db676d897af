"""The compatible mode: vLLM's own server and processes, with weights from our region, behind our door."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import openai_examples
import pytest
from process_tree import shared_memory_of
from waiting import until

PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


def test_it_answers_as_the_fast_engine_does(start: Callable[..., Any], example: Path) -> None:
    torch_engine = start("--model", example)
    expected = torch_engine.complete("Return the", max_tokens=8, logprobs=1)["choices"][0]
    assert torch_engine.stop() == 0
    serving = start("--model", example, "--engine", "vllm", "--vllm-mode", "compatible")
    body = {"prompt": "Return the", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    status, answer, _ = serving.request("POST", "/v1/completions", body, timeout_s=PATIENCE_S)
    assert status == 200, answer
    assert answer["choices"][0]["text"] == expected["text"]
    assert answer["choices"][0]["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
    assert "a start takes as long as vLLM's own" in serving.output()
    url = f"http://127.0.0.1:{serving.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0) as client:
        for shown in (openai_examples.streaming, openai_examples.responses):
            shown(client, "pydoc-lm")
    assert serving.metric("vllm:request_success_total") >= 3
    leave_early(serving)
    assert serving.stop() == 0  # vLLM's processes and the folder are gone, too


def test_nothing_is_left_of_a_killed_instance_whose_vllm_does_not_end(
    start: Callable[..., Any], example: Path, tmp_path: Path
) -> None:
    """While vLLM's server starts, it may take SIGTERM for the failure of a part of it. Here it ignores it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal\n"
        "from signal import SIGTERM, SIG_IGN, signal as set_handler\n"
        "signal.signal = lambda number, handler: set_handler(number, SIG_IGN if number == SIGTERM else handler)\n"
    )
    environ = {"PYTHONPATH": str(tmp_path)}
    serving = start("--model", example, "--engine", "vllm", "--vllm-mode", "compatible", env=environ)
    until(lambda: queues_of(serving))
    names, descendants = queues_of(serving), serving.children()
    serving.process.kill()
    assert serving.wait_gone(descendants) == -signal.SIGKILL
    until(lambda: not any(Path("/dev/shm", name).exists() for name in names))


def queues_of(serving: Any) -> set[str]:
    """The queues in shared memory that the instance's processes have opened."""
    return {name for name in shared_memory_of(serving.children()) if name.startswith("psm_")}


def leave_early(serving: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=PATIENCE_S)
    body = {"prompt": "Return the", "max_tokens": 480, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data:")
    connection.close()
    until(lambda: serving.metric("medusa_engine_running") == 0)


# A version that was not tested, whose core has another name for a part that is only used for steps.
OTHER_VERSION = """
import os, sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in ("vllm.v1.engine.core", "medusa_vllm.version"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            if name == "medusa_vllm.version":
                module.installed_version = lambda: "0.99.0"
            elif "_MEDUSA_ENGINE_KEY" not in os.environ:  # not in vLLM's own processes
                module.EngineCore.after_step = module.EngineCore.post_step
                del module.EngineCore.post_step
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def test_a_version_whose_core_has_other_parts_is_served_after_all(
    start: Callable[..., Any], example: Path, tmp_path: Path
) -> None:
    """It failed at the first step, again and again. And what is found missing while it loads ended early requests."""
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    flags = ("--engine", "vllm", "--kv-cache-mb", "64", "--max-concurrency", "4")
    serving = start("--model", example, *flags, env={"PYTHONPATH": str(tmp_path)})
    status, answer, _ = serving.request("POST", "/v1/completions", {"prompt": "x"}, timeout_s=PATIENCE_S)
    assert status == 200, answer
    assert "vLLM 0.99.0: its core has no post_step. Its own server and processes are used" in serving.output()
    assert serving.stop() == 0


TEMPLATE = "{% if messages[0].content == 'large' %}{{ 'a' * 1000000000 }}{% endif %}{{ messages[0].content }}"


def test_its_own_routes_have_limits_and_it_answers_the_engine_where_it_demands_a_key(
    start: Callable[..., Any], example: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(example, tmp_path / "model", ignore=shutil.ignore_patterns(".medusa"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "handler.py").write_text(
        "class Handler:\n"
        "    def load(self, context):\n"
        "        self.model = context.model\n"
        "    def predict(self, request):\n"
        "        return self.model.generate('Return the', max_tokens=4)\n"
    )
    arguments = ("--model", model, "--handler", f"{tmp_path / 'handler.py'}:Handler", "--engine", "vllm")
    flags = ("--vllm-mode", "compatible", "--", "--api-key", "secret")
    serving = start(*arguments, *flags, env={"VLLM_PLUGINS": "another"})

    def ask(path: str, key: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return serving.exchange("POST", path, json.dumps(body), headers, timeout_s=PATIENCE_S)

    def chat(content: str, key: str = "secret") -> Any:
        messages = [{"role": "user", "content": content}]
        return ask("/v1/chat/completions", key, {"messages": messages, "max_tokens": 1})

    answer = ask("/", "none", {})
    assert answer.status == 200, answer.text
    assert chat("Return", "another").status == 401
    answer = chat("Return")
    assert answer.status == 200, answer.text
    answer = chat("large")
    assert answer.status == 400, answer.text
    assert "the chat template took more than 256 MB of memory" in answer.text
    answer = ask("/v1/responses", "secret", {"input": [{"a": 1}] * 1000})
    assert answer.status == 400
    assert len(answer.text) < 100_000, "each wrong item is described"
    assert serving.stop() == 0
