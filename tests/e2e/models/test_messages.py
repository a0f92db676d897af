"""Anthropic's Messages API through the real engine and the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from thinking_model import THOUGHT, write_thinker

pytest.importorskip("llguidance", reason="structured outputs need llguidance")
pytestmark = pytest.mark.forked

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "greet", "input_schema": PERSON}
FORM: Any = {"format": {"type": "json_schema", "schema": PERSON}}
ON: Any = {"type": "enabled", "budget_tokens": 1024}
OFF: Any = {"type": "disabled"}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def serving(start_shared: Callable[..., Any], thinker: Path) -> Any:
    return start_shared("--model", thinker, "--served-model-name", "qwen", "--kv-cache-mb", "16")


@pytest.fixture(scope="module")
def client(serving: Any) -> Iterator[Any]:
    import anthropic  # takes a second

    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{serving.port}", api_key="none", max_retries=0) as made:
        yield made


def asked(**options: Any) -> dict[str, Any]:
    extra = {"extra_body": {"temperature": 0}}
    return {"model": "qwen", "max_tokens": 100, "messages": [{"role": "user", "content": "2+2"}], **extra, **options}


def shown(message: Any) -> list[Any]:
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in message.content]


def both(client: Any, **options: Any) -> Any:
    """Return the whole answer, after a check that a stream adds up to the same one."""
    whole = client.messages.create(**asked(**options))
    with client.messages.stream(**asked(**options)) as events:
        final = events.get_final_message()
    assert shown(final) == shown(whole)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    return whole


THOUGHTS = ("thinking", "I add two.")


@pytest.mark.parametrize(
    ("options", "expected", "reason", "sequence"),
    [
        ({}, [THOUGHTS, ("text", "Four")], "end_turn", None),
        ({"thinking": ON}, [THOUGHTS, ("text", "Four")], "end_turn", None),
        ({"thinking": {"type": "adaptive"}}, [THOUGHTS, ("text", "Four")], "end_turn", None),
        ({"thinking": OFF}, [("text", "Four")], "end_turn", None),
        ({"max_tokens": 3}, [("thinking", "I add")], "max_tokens", None),
        ({"max_tokens": 20_000}, [THOUGHTS, ("text", "Four")], "end_turn", None),
        ({"stop_sequences": ["never", "dd tw"]}, [("thinking", "I a")], "stop_sequence", "dd tw"),
        ({"stop_sequences": ["Fo"]}, [THOUGHTS], "stop_sequence", "Fo"),
        ({"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "<think>I"}]},
         [("thinking", " add two."), ("text", "Four")], "end_turn", None),
    ],
)  # fmt: skip
def test_a_model_reasons_and_answers(
    client: Any, options: dict[str, Any], expected: list[Any], reason: str, sequence: str | None
) -> None:
    message = both(client, **options)
    assert shown(message) == expected
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_tokens_are_counted(client: Any) -> None:
    message = both(client)
    assert message.usage.output_tokens_details.thinking_tokens == len(THOUGHT)
    counted = client.messages.count_tokens(model="qwen", messages=asked()["messages"])
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "greet"}])
@pytest.mark.parametrize("thinking", [ON, OFF])
def test_a_forced_call_and_one_that_is_cut(client: Any, choice: Any, thinking: Any) -> None:
    options = {"tools": [TOOL], "tool_choice": choice | {"disable_parallel_tool_use": True}, "thinking": thinking}
    message = both(client, **options)
    *before, (kind, given) = shown(message)
    assert before == ([THOUGHTS] if thinking is ON else [])
    assert (kind, given["name"] in ("Ada", "Bob"), message.stop_reason) == ("tool_use", True, "tool_use")
    for most in range(1, message.usage.output_tokens - 1):
        cut = client.messages.create(**asked(**options, max_tokens=most))
        assert cut.stop_reason == "max_tokens"
        assert [given for kind, given in shown(cut) if kind == "tool_use"] in ([], [{}], [given])
    again = [
        *asked()["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "ok"}]},
    ]
    assert shown(both(client, messages=again, thinking=OFF)) == [("text", "Four")]


def test_the_form_of_an_answer(client: Any) -> None:
    for thinking in (ON, OFF):
        *_, (kind, text) = shown(both(client, output_config=FORM, thinking=thinking))
        assert (kind, json.loads(text)["name"] in ("Ada", "Bob")) == ("text", True)


def test_a_form_that_cannot_be_used_is_named(client: Any) -> None:
    import anthropic

    bad = {"format": {"type": "json_schema", "schema": {"type": "no such type"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: this json_schema"):
        client.messages.create(**asked(output_config=bad))


def test_the_command_of_the_page(serving: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "messages.md").read_text()
    sent = next(line for line in page.splitlines() if line.startswith("curl ")).partition("-d '")[2].rstrip("'")
    answer = serving.exchange("POST", "/v1/messages", sent, {"Content-Type": "application/json"})
    assert (answer.status, answer.json["content"][-1]) == (200, {"type": "text", "text": "Four"})
