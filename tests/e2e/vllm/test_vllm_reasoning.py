"""Reasoning by vLLM's parser, which a flag behind -- names, and the same from the torch engine by ours.

Two things are compared: an engine's stream with its whole answer, and the whole answers of both engines. In a stream of
vLLM the reasoning may begin with its opening tag, see tests/vllm/test_reasoning_of_vllm.py: that depends on how many
tokens vLLM's server has merged into the first delta, and so on this machine's load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from thinking_model import write_thinker

PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]
OPEN = {"chat_template_kwargs": {"thinking": True}}
CHOICE = {"structured_outputs": {"choice": ["yes", "yet"]}}


@pytest.fixture(scope="module")
def clients(
    start_shared: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[openai.OpenAI]]:
    """Clients of both engines. For a model of text only, vLLM needs no tokenizer unless a parser asks for it."""
    thinker = write_thinker(tmp_path_factory.mktemp("thinker"))
    flags = ("--engine", "vllm", "--", "--reasoning-parser", "deepseek_r1", "--served-model-name", "thinker")
    with ExitStack() as stack:
        made = []
        for own in (flags, ("--served-model-name", "thinker")):
            serving = start_shared("--model", thinker, "--kv-cache-mb", "64", *own)
            url = f"http://127.0.0.1:{serving.port}/v1"
            client = openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0)
            made.append(stack.enter_context(client))
        yield made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extra_body": OPEN},
        {"max_tokens": 3},
        {"max_tokens": 6},
        {"stop": "."},
        {"extra_body": CHOICE},
        {"extra_body": OPEN | CHOICE},
        {"extra_body": {"include_reasoning": False}},
    ],
)
def test_both_engines_say_the_same(clients: list[openai.OpenAI], options: dict[str, Any]) -> None:
    asked: Any = {"model": "thinker", "messages": [{"role": "user", "content": "2+2"}], "temperature": 0, **options}
    found = []
    for client in clients:
        whole = client.chat.completions.create(**asked)
        choice = whole.choices[0]
        reasoning, content = "", ""
        for chunk in client.chat.completions.create(**asked, stream=True):
            reasoning += getattr(chunk.choices[0].delta, "reasoning", None) or ""
            content += chunk.choices[0].delta.content or ""
        if client is clients[0]:
            reasoning = reasoning.removeprefix("<think>")
        assert (reasoning or None, content or None) == (choice.message.reasoning, choice.message.content)  # type: ignore[attr-defined]
        assert whole.usage is not None
        found.append((reasoning, content, choice.finish_reason, whole.usage.completion_tokens))
    assert found[0] == found[1]


def test_a_parser_that_vllm_makes_of_its_parts_for_tool_calls_is_there_in_a_cold_process(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """Qwen3's is. vLLM reads its tags when it makes its configuration, before its server is imported."""
    flags = ("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_xml")
    serving = start("--model", write_thinker(tmp_path), "--engine", "vllm", "--kv-cache-mb", "64", "--", *flags)
    asked = {"messages": [{"role": "user", "content": "2+2"}], "temperature": 0}
    status, answer, _ = serving.request("POST", "/v1/chat/completions", asked, PATIENCE_S)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I add two.", "Four")
    assert serving.stop() == 0
