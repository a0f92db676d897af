"""Messages in the format of gpt-oss, by a model that always writes the same, through the real engine and client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from harmony_model import FIRST, SECOND, THOUGHT, write_harmony_thinker

pytest.importorskip("llguidance", reason="structured outputs need llguidance")
pytestmark = pytest.mark.forked

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": PERSON}} for name in ("greet", "call")]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
SAID = [*FIRST[1:], *SECOND]  # the first word is the prompt's last


@pytest.fixture(scope="module")
def client(start_shared: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    thinker = write_harmony_thinker(tmp_path_factory.mktemp("thinker"))
    serving = start_shared("--model", thinker, "--served-model-name", "thinker", "--kv-cache-mb", "16")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, *, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    options = {"max_tokens": 100, "temperature": 0, "messages": [{"role": "user", "content": "2+2"}], **options}
    return client.chat.completions.create(model="thinker", extra_body=extra, **options)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """The reasoning, the content, the calls and the finish reason."""
    reasoning, content, calls, reason = "", "", [], None
    for chunk in ask(client, stream=True, **options):
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.function.name is not None:
                calls.append((call.function.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.function.arguments)
        reason = choice.finish_reason or reason
    return reasoning, content, calls, reason


def test_a_model_reasons_and_answers_as_far_as_its_tokens_go(client: openai.OpenAI) -> None:
    thought, answer = SAID.index(THOUGHT[0]), SAID.index("Four")
    for most in range(1, len(SAID) + 1):
        choice = ask(client, max_tokens=most).choices[0]
        reasoning = "".join(THOUGHT[: max(most - thought, 0)])
        content = "Four" if most > answer else ""
        reason = "stop" if most == len(SAID) else "length"
        assert (choice.message.reasoning or "", choice.message.content or "") == (reasoning, content)
        assert choice.finish_reason == reason
        assert streamed(client, max_tokens=most) == (reasoning, content, [], reason)


def test_each_token_is_counted_and_has_its_log_probability(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True)
    assert [token.token for token in answer.choices[0].logprobs.content] == SAID
    assert answer.usage.completion_tokens == len(SAID)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(THOUGHT)


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ({"response_format": FORM}, [{"name": "Ada"}, {"name": "Bob"}]),
        ({"extra": {"structured_outputs": {"choice": ["1", "2"]}}}, [1, 2]),
        ({"extra": {"structured_outputs": {"regex": "[12]"}}}, [1, 2]),
        ({"extra": {"structured_outputs": {"grammar": 'root ::= "1" | "2"'}}}, [1, 2]),
    ],
)
def test_the_form_of_an_answer_is_that_of_the_final_message(
    client: openai.OpenAI, asked: dict[str, Any], allowed: list[Any]
) -> None:
    choice = ask(client, **asked).choices[0]
    assert (choice.message.reasoning, choice.finish_reason) == ("I add two.", "stop")
    assert json.loads(choice.message.content) in allowed
    assert streamed(client, **asked) == ("I add two.", choice.message.content, [], "stop")
    cut = ask(client, max_tokens=4, **asked).choices[0]
    assert (cut.message.reasoning, cut.message.content, cut.finish_reason) == ("I", None, "length")


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", ["greet", "call"], "tool_calls"),
        ({"type": "function", "function": {"name": "call"}}, ["call"], "stop"),
    ],
)
def test_a_forced_call_comes_behind_the_reasoning(
    client: openai.OpenAI, choice: Any, names: list[str], reason: str
) -> None:
    found = ask(client, tools=TOOLS, tool_choice=choice).choices[0]
    assert (found.message.reasoning, found.message.content, found.finish_reason) == ("I add two.", None, reason)
    [call] = found.message.tool_calls
    assert call.function.name in names
    assert json.loads(call.function.arguments)["name"] in ("Ada", "Bob")
    calls = [(call.function.name, call.function.arguments)]
    assert streamed(client, tools=TOOLS, tool_choice=choice) == ("I add two.", "", calls, reason)
    cut = ask(client, tools=TOOLS, tool_choice=choice, max_tokens=4).choices[0]
    assert (cut.message.tool_calls, cut.message.content, cut.finish_reason) == (None, None, "length")


def test_a_response_reasons_and_has_its_form_or_a_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "thinker", "input": "2+2", "temperature": 0}
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    whole = client.responses.create(**asked, text=form)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert json.loads(whole.output_text)["name"] in ("Ada", "Bob")
    tools: Any = [{"type": "function", "name": "greet", "parameters": PERSON, "strict": True}]
    with client.responses.stream(**asked, tools=tools, tool_choice="required") as stream:
        final = stream.get_final_response()
    reasoning, call = final.output
    assert (reasoning.type, call.type) == ("reasoning", "function_call")
    assert json.loads(call.arguments)["name"] in ("Ada", "Bob")  # type: ignore[union-attr]
    assert final.status == "completed"
