"""Messages in the format of gpt-oss, read by our routes over both engines: they say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from harmony_model import write_harmony_thinker

PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "greet", "parameters": PERSON}}
OTHER: Any = {"type": "function", "function": {"name": "gone", "parameters": PERSON}}


@pytest.fixture(scope="module")
def clients(
    start_shared: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[openai.OpenAI]]:
    thinker = write_harmony_thinker(tmp_path_factory.mktemp("thinker"))
    with ExitStack() as stack:
        made = []
        for engine in ("vllm", "torch"):
            named = ("--engine", engine, "--served-model-name", "thinker")
            serving = start_shared("--model", thinker, "--kv-cache-mb", "64", *named)
            url = f"http://127.0.0.1:{serving.port}/v1"
            client = openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0)
            made.append(stack.enter_context(client))
        yield made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 2},
        {"max_tokens": 5},
        {"stop": "."},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"extra_body": {"structured_outputs": {"choice": ["yes", "yet"]}}},
        {"extra_body": {"structured_outputs": {"regex": "[ab]c"}}},
        {"extra_body": {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}},
        {"tools": [TOOL, OTHER]},
        {"tools": [TOOL, OTHER], "tool_choice": "required"},
        {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "gone"}}},
    ],
)
def test_both_engines_say_the_same(clients: list[openai.OpenAI], options: dict[str, Any]) -> None:
    asked: Any = {"model": "thinker", "messages": [{"role": "user", "content": "2+2"}], "temperature": 0, **options}
    found = []
    for client in clients:
        whole = client.chat.completions.create(**asked)
        choice = whole.choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
        reasoning, content = "", ""
        for chunk in client.chat.completions.create(**asked, stream=True):
            reasoning += getattr(chunk.choices[0].delta, "reasoning", None) or ""
            content += chunk.choices[0].delta.content or ""
        message: Any = choice.message
        assert (reasoning, content) == (message.reasoning or "", message.content or "")
        assert whole.usage is not None
        found.append((reasoning, content, calls, choice.finish_reason, whole.usage.completion_tokens))
    assert found[0] == found[1]
    assert found[0][0].startswith("I") or options == {"max_tokens": 2}
