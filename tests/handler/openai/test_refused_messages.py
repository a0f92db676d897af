"""What /v1/messages refuses: each with one 400 that names the field or block at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

TEMPLATE = "{# tools: <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}<assistant>"
TOOL: Any = {"name": "weather", "input_schema": {"type": "object"}}
USE: Any = {"type": "tool_use", "id": "x", "name": "weather", "input": {}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "x"}
WRONG: Any = [None, True, 3, -1.5, "", "x", [], [3], [[]], {}, {"type": 3}, {"type": ["text"]}, {"x": {"y": []}}]


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def after_use(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [USE]}, {"role": "user", "content": list(blocks)}]}


def post(served: Any, body: Any, path: str = "/v1/messages") -> tuple[int, Any]:
    return served.request("POST", path, body)[:2]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"messages": None}, "messages", "at least one message"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [3]}, "messages[0]", "a role and content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "user, assistant, system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "text or a list of blocks"),
        ({"messages": [{"role": "user", "content": "x", "nme": 1}]}, "messages[0].nme", "unknown parameter"),
        (user([3]), "messages[0].content[0]", "an object with a type"),
        (user([{"type": "text"}]), "messages[0].content[0].text", "text"),
        (user([{"type": "text", "text": "x", "txt": 1}]), "messages[0].content[0].txt", "did you mean"),
        (user([{"type": "image", "source": {}}]), "messages[0].content[0].type", "sound use --engine vllm"),
        (user([{"type": "document", "source": {}}]), "messages[0].content[0].type", "sound use --engine vllm"),
        (user([USE]), "messages[0].content[0].type", "text or tool_result"),
        (user([RESULT]), "messages[0].content[0].tool_use_id", "a message before it"),
        (after_use({"type": "tool_result"}), "messages[1].content[0].tool_use_id", "text, found nothing"),
        (after_use(RESULT | {"is_error": "yes"}), "messages[1].content[0].is_error", "true or false"),
        (after_use(RESULT | {"content": 3}), "messages[1].content[0].content", "text or a list of blocks"),
        (after_use(RESULT | {"content": [{"type": "image"}]}), "messages[1].content[0].content[0].type", "text only"),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages", "tool_result blocks behind"),
        ({"messages": [{"role": "assistant", "content": [USE | {"input": "{}"}]}]}, "messages[0].content[0].input",
         "an object"),
        ({"messages": [{"role": "assistant", "content": [USE | {"name": ""}]}]}, "messages[0].content[0].name",
         "letters"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages[0].content[0].thinking",
         "text"),
        ({"system": 3}, "system", "text or a list of blocks"),
        ({"system": [{"type": "image"}]}, "system[0].type", "text only"),
        ({"max_tokens": None}, "max_tokens", "at least 1, found nothing"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": "3"}, "max_tokens", "a whole number"),
        ({"temperature": 1.5}, "temperature", "from 0 to 1"),
        ({"top_p": 2}, "top_p", "up to 1"),
        ({"top_k": 0.5}, "top_k", "a whole number"),
        ({"stop_sequences": [""]}, "stop_sequences", "none of them empty"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "at most 16"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"tools": {}}, "tools", "a list of objects"),
        ({"tools": [3]}, "tools[0]", "the only type of tools here"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]", "the only type of tools here"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "a JSON schema"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name", "letters"),
        ({"tools": [TOOL | {"description": 3}]}, "tools[0].description", "text"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading", "at once"),
        ({"tools": [TOOL | {"parameters": {}}]}, "tools[0].parameters", "unknown parameter"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "auto, any, tool (and a name) or none"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "one of the tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice", "one of the tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "x": 1}}, "tool_choice.x", "unknown parameter"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 3}},
         "tool_choice.disable_parallel_tool_use", "true or false"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "tools with it"),
        ({"thinking": True}, "thinking", "an object"),
        ({"thinking": {"type": "on"}}, "thinking.type", "enabled, disabled, adaptive"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens", "a whole number"),
        ({"thinking": {"type": "enabled", "display": 3}}, "thinking.display", "text"),
        ({"output_config": "high"}, "output_config", "an object"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "low, medium, high, xhigh, max"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format", '"json_schema"'),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "schema"),
        ({"stop": "x"}, "stop", "use stop_sequences"),
        ({"max_token": 3}, "max_token", "did you mean max_tokens?"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "calls no tools itself"),
        ({"container": "x"}, "container", "Anthropic's own service"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "an object"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(served: Any, body: Any, param: str, text: str) -> None:
    status, answer = post(served, user("x") | {"max_tokens": 1} | body)
    assert status == 400, answer
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    message = answer["error"]["message"]
    assert answer["error"]["param"] == param
    assert param in message
    assert text in message
    assert "\n" not in message


def variants(value: Any) -> Any:
    """Yield copies of a value, each with one wrong value somewhere in it."""
    yield from WRONG
    if isinstance(value, dict):
        for name, part in value.items():
            for variant in variants(part):
                yield value | {name: variant}
            yield {other: part for other, part in value.items() if other != name}
    elif isinstance(value, list):
        for number, part in enumerate(value):
            for variant in variants(part):
                yield [*value[:number], variant, *value[number + 1 :]]


def test_wrong_types_everywhere(served: Any) -> None:
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    body = {
        "max_tokens": 2, "system": [text], "stop_sequences": ["x"], "stream": False, "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": [text]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "b"}, text, USE]},
            {"role": "user", "content": [RESULT | {"is_error": True, "content": [text]}]},
        ],
        "tools": [TOOL | {"description": "d"}], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}, "top_k": 3,
        "temperature": 0.5, "top_p": 0.5,
    }  # fmt: skip
    assert post(served, body)[0] == 200
    with_connection = served.connect()
    found = set()
    for variant in variants(body):
        with_connection.request("POST", "/v1/messages", json.dumps(variant), {"Content-Type": "application/json"})
        response = with_connection.getresponse()
        answer = response.read()
        found.add(response.status)
        assert response.status in (200, 400, 404), (variant, answer)
        if response.status == 200 and json.loads(json.dumps(variant)).get("stream") is not True:
            assert json.loads(answer)["type"] == "message"
        elif response.status != 200:
            error = json.loads(answer)
            assert error.keys() == {"type", "error"}
            assert "found" in error["error"]["message"] or "parameter" in error["error"]["message"], (variant, error)
    with_connection.close()
    assert found == {200, 400}
    assert "Traceback" not in served.output()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_is_deep_or_large(served: Any, path: str) -> None:
    more: Any = {"max_tokens": 2} if path == "/v1/messages" else {}
    deep: Any = {"type": "object"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    large = {"type": "object", "properties": {f"field{n}": {"type": "string", "enum": ["x"] * 20} for n in range(3000)}}
    for schema in (deep, large):
        tools = [{"name": "f", "input_schema": schema}]
        assert post(served, user("a") | more | {"tools": tools}, path)[0] == 200
        used = [{"role": "assistant", "content": [USE | {"input": schema}]}, {"role": "user", "content": [RESULT]}]
        assert post(served, {"messages": used} | more, path)[0] == 200
    nested = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in (nested, b"{", b"[]", b"\xff"):
        status, answer = post(served, body, path)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "Traceback" not in served.output()
