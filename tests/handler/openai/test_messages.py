"""/v1/messages, as Anthropic's own client sees it: its types, its accumulated streams, and a round of tools."""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from medusa_handler.openai.body import fields
from pydantic import BaseModel, TypeAdapter

Serve = Callable[..., Any]
TEMPLATE = (
    "{# tools: <tool_call> #}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME: Any = {"name": "time", "input_schema": {"type": "object"}, "type": "custom", "strict": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
ERRORS = {400: "invalid_request_error", 404: "not_found_error", 405: "invalid_request_error"}


@pytest.fixture
def claude(served: Any) -> Iterator[Any]:
    """Anthropic's client. Its import takes a second."""
    import anthropic

    url = f"http://127.0.0.1:{served.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def extras(value: Any) -> set[str]:
    """Return the fields that the client's types do not have."""
    if isinstance(value, list):
        return set().union(*map(extras, value))
    if not isinstance(value, BaseModel):
        return set()
    own = set(value.model_extra or {})
    return own.union(*(extras(each) for _, each in value))


def ask(served: Any, text: Any = "hi", **body: Any) -> Any:
    from anthropic.types import Message

    asked = {"messages": user(text), "max_tokens": 50} | body
    status, answer, _ = served.request("POST", "/v1/messages", asked)
    assert status == 200, answer
    found = Message.model_validate(answer, strict=True)
    assert not extras(found)
    return found


def refused(served: Any, **body: Any) -> tuple[int, str]:
    status, answer, _ = served.request("POST", "/v1/messages", {"messages": user("a"), "max_tokens": 5} | body)
    assert answer.keys() == {"type", "error"}, answer
    assert (answer["type"], answer["error"]["type"]) == ("error", ERRORS[status])
    return status, answer["error"]["message"]


def stream(served: Any, text: Any = "hi", **body: Any) -> list[Any]:
    asked = {"messages": user(text), "max_tokens": 50, "stream": True} | body
    status, raw, headers = served.request("POST", "/v1/messages", asked)
    assert status == 200, raw
    assert headers["content-type"].startswith("text/event-stream")
    return parsed(raw)


def parsed(raw: bytes) -> list[Any]:
    """Return the events of a stream without pings and errors, each checked against the client's type of its name."""
    from anthropic.types import RawMessageStreamEvent

    events: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    found = []
    for block in raw.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name, data = lines
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
        if name == "event: ping":
            assert data == 'data: {"type":"ping"}'
            continue
        event = events.validate_json(data.removeprefix("data: "), strict=True)
        assert not extras(event)
        found.append(event)
    return found


def accumulated(events: list[Any]) -> list[Any]:
    """Return the blocks of a stream, after a check that its events come in Anthropic's order."""
    assert (events[0].type, events[-2].type, events[-1].type) == ("message_start", "message_delta", "message_stop")
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    blocks: list[Any] = []
    is_open = False
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert not is_open
            assert event.index == len(blocks)
            blocks.append([event.content_block.type, "", event.content_block])
        else:
            assert is_open
            assert event.index == len(blocks) - 1
            if event.type == "content_block_delta" and event.delta.type != "signature_delta":
                _, value = [value for _, value in event.delta][::-1]
                blocks[-1][1] += value
        is_open = event.type != "content_block_stop"
    assert not is_open
    return blocks


def shown(content: Any) -> list[Any]:
    return [block.text if block.type == "text" else (block.name, block.input) for block in content]


def test_a_text_is_answered(served: Any) -> None:
    served.prompts()
    found = ask(served, "hi", model="words", system="Be short.", max_tokens=3, metadata={"user_id": "u"})
    assert (shown(found.content), found.stop_reason, found.stop_sequence) == (["w0 w1 w2"], "max_tokens", None)
    assert (found.id[:4], found.type, found.role, found.model) == ("msg_", "message", "assistant", "words")
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.cache_read_input_tokens) == (2, 3, 0)
    assert served.prompts() == [repr("<system>Be short.<user>hi<assistant>")]
    done = ask(served, [{"type": "text", "text": "say:done", "cache_control": {"type": "ephemeral"}}])
    assert (shown(done.content), done.stop_reason) == (["done"], "end_turn")


def test_blocks_become_messages(served: Any) -> None:
    served.prompts()
    ask(
        served,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"},
            {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be short."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "d", "citations": None},
                {"type": "tool_use", "id": "x1", "name": "weather", "input": {"city": "Rom"}},
                {"type": "tool_use", "id": "x2", "name": "weather", "input": {"city": "Bonn"}, "caller": None},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "x1", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "x2", "is_error": True, "content": [
                    {"type": "text", "text": "no"}, {"type": "text", "text": "sun"},
                ]},
                {"type": "text", "text": "and?"},
            ]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "x3", "name": "weather", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x3"}]},
            {"role": "system", "content": "Go on."},
        ],
    )  # fmt: skip
    assert served.prompts() == [
        repr(
            "<system>Be kind.\nBe short.<user>a\nb\nc<assistant>(hm)d[x1 weather Rom][x2 weather Bonn]<tool>rain"
            "<tool>Error: no\nsun<user>and?<assistant>[x3 weather ]<tool><system>Go on.<assistant>"
        )
    ]


def test_the_last_message_is_continued_if_it_is_the_assistants(served: Any) -> None:
    served.prompts()
    ask(served, messages=[*user("a"), {"role": "assistant", "content": "The answer is ("}])
    assert served.prompts() == [repr("<user>a<assistant>The answer is (")]


def test_a_stream_has_anthropics_events(served: Any) -> None:
    events = stream(served, "say:hello you")
    assert accumulated(events)[0][:2] == ["text", "hello you"]
    assert [event.type for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert (events[0].message.usage.input_tokens, events[0].message.model) == (2, "words")
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens, events[-2].usage.input_tokens) == (
        "end_turn", 3, 2,
    )  # fmt: skip
    cut = stream(served, "a", max_tokens=2)
    assert (cut[-2].delta.stop_reason, accumulated(cut)[0][1]) == ("max_tokens", "w0 w1")


def test_a_stop_sequence_is_named(served: Any) -> None:
    found = ask(served, "a", stop_sequences=["w2", "w9"])
    assert (shown(found.content), found.stop_reason, found.stop_sequence) == (["w0 w1"], "stop_sequence", "w2")
    [*_, last, _] = stream(served, "a", stop_sequences=["w0"])
    assert (last.delta.stop_reason, last.delta.stop_sequence) == ("stop_sequence", "w0")
    assert shown(ask(served, "a", stop_sequences=["w0"]).content) == [""]


CALLS = [
    (CALL, [("weather", {"city": "Köln"})], "tool_use"),
    (f"Well. {CALL}", ["Well.", ("weather", {"city": "Köln"})], "tool_use"),
    (f'{CALL}\n<tool_call>{{"name": "time"}}</tool_call> Done.', [
        ("weather", {"city": "Köln"}), ("time", {}), " Done.",
    ], "tool_use"),
    ("no call", ["no call"], "end_turn"),
    ("<tool_call>no call</tool_call>", ["<tool_call>no call</tool_call>"], "end_turn"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "expected", "reason"), CALLS)
def test_calls_are_blocks(served: Any, said: str, expected: list[Any], reason: str) -> None:
    asked = {"text": f"say:{said}", "tools": [WEATHER, TIME]}
    whole = ask(served, **asked)
    assert (shown(whole.content), whole.stop_reason) == (expected, reason)
    events = stream(served, **asked)
    found = [text if kind == "text" else (block.name, json.loads(text)) for kind, text, block in accumulated(events)]
    assert (found, events[-2].delta.stop_reason) == (expected, reason)


def test_one_call_at_a_time(served: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(served, f"say:{CALL}{CALL}", tools=[WEATHER], tool_choice=choice).content) == 1


@pytest.mark.parametrize(("choice", "said"), [
    ({"type": "any"}, '[{"name": "weather", "parameters": {"city": "Rom"}}]'),
    ({"type": "tool", "name": "weather"}, '{"city": "Rom"}'),
])  # fmt: skip
def test_a_forced_call(serve: Serve, choice: Any, said: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<assistant>"
    served = serve(files={"chat_template.jinja": template})
    served.wait_ready()
    found = ask(served, f"say:{said}", tools=[WEATHER, TIME], tool_choice=choice)
    assert (shown(found.content), found.stop_reason) == ([("weather", {"city": "Rom"})], "tool_use")
    cut = ask(served, 'say:{"city": "Ro', tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert shown(cut.content) == [("weather", {})]


def test_the_client_runs_a_round_of_tools(claude: Any, served: Any) -> None:
    asked: Any = {"model": "words", "max_tokens": 40, "tools": [WEATHER], "stop_sequences": ["never"]}
    messages: Any = user(f"say:Well. {CALL}")
    with claude.messages.stream(messages=messages, **asked) as events:
        snapshots = [event.snapshot for event in events if event.type == "input_json"]
        answer = events.get_final_message()
    assert snapshots[-1] == {"city": "Köln"}
    assert (answer.stop_reason, answer.usage.output_tokens > 3) == ("tool_use", True)
    call = answer.content[1]
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]},
        ]},
    ]  # fmt: skip
    counted = claude.messages.count_tokens(model="words", messages=messages, tools=[WEATHER])
    served.prompts()
    second = claude.beta.messages.create(messages=messages, betas=["context-management-2025-06-27"], **asked)
    assert second.usage.input_tokens == counted.input_tokens
    assert f"[{call.id} weather Köln]<tool>sunny<assistant>" in served.prompts()[0]
    assert second._request_id is not None


def test_what_clients_send_as_a_matter_of_course(claude: Any) -> None:
    found = claude.beta.messages.create(
        model="words", max_tokens=20_000, messages=user("say:hi"), metadata={"user_id": "u"}, service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 19_999}, cache_control={"type": "ephemeral"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"}, betas=["claude-code-20250219"], extra_headers={"anthropic-version": "x"},
        extra_body={"temperature": 1, "top_k": 5, "top_p": 0.9},
        tools=[TIME | {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True, "defer_loading": False}],
    )  # fmt: skip
    assert found.content[0].text == "hi"


def test_the_clients_errors(claude: Any, serve: Serve) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="other"):
        claude.messages.create(model="other", max_tokens=1, messages=user("a"))
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        claude.messages.create(model="words", max_tokens=1, messages=user("a " * 200))
    served = serve(token="secret", files={"chat_template.jinja": TEMPLATE})
    served.wait_ready()
    url = f"http://127.0.0.1:{served.port}"
    for key in ({"api_key": "secret"}, {"auth_token": "secret", "api_key": None}):
        with anthropic.Anthropic(base_url=url, max_retries=0, **key) as client:
            assert client.messages.create(model="words", max_tokens=1, messages=user("a")).content
    with (
        anthropic.Anthropic(base_url=url, max_retries=0, api_key="wrong") as client,
        pytest.raises(anthropic.AuthenticationError) as raised,
    ):
        client.messages.create(model="words", max_tokens=1, messages=user("a"))
    assert raised.value.type == "authentication_error"


def test_tokens_are_counted_without_an_answer(served: Any) -> None:
    body = {"messages": user("a question ?"), "system": "Be kind."}
    status, counted, _ = served.request("POST", "/v1/messages/count_tokens?beta=true", body)
    assert (status, counted) == (200, {"input_tokens": ask(served, **body).usage.input_tokens})
    status, answer, _ = served.request("POST", "/v1/messages/count_tokens", body | {"temperature": 1})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


THINKER = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<assistant>{# <think></think> {{ tools }} <tool_call> #} "
    "{{ enable_thinking }} {{ reasoning_effort }}{% if thinking is false %}<think></think>{% endif %}"
)


def test_the_reasoning_is_a_block(serve: Serve) -> None:
    served = serve(files={"chat_template.jinja": THINKER})
    served.wait_ready()
    asked = {"text": f"say:<think>hm </think>\n\n{CALL}", "tools": [WEATHER]}
    whole = ask(served, thinking={"type": "enabled", "budget_tokens": 1024}, **asked)
    assert [block.type for block in whole.content] == ["thinking", "tool_use"]
    assert (whole.content[0].thinking, whole.stop_reason) == ("hm ", "tool_use")
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    events = stream(served, output_config={"effort": "low"}, **asked)
    assert [block[:2] for block in accumulated(events)] == [
        ["thinking", "hm "], ["tool_use", '{"city": "Köln"}'],
    ]  # fmt: skip
    ask(served, "x", thinking={"type": "disabled"})
    ask(served, "x", thinking={"type": "adaptive"}, chat_template_kwargs={"enable_thinking": "mine"})
    prompts = served.prompts()
    assert [prompt.rpartition("<assistant>")[2].strip("'\"") for prompt in prompts] == [
        " True ", "  low", " False <think></think>", " mine ",
    ]  # fmt: skip


def test_a_template_that_takes_the_system_first_only(serve: Serve) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    served = serve(files={"chat_template.jinja": template})
    served.wait_ready()
    ask(served, system="A.", messages=[*user("b"), {"role": "system", "content": "C."}, *user("d")])
    assert served.prompts() == ["'<system>A.\\nC.<user>b<user>d'"]


def test_a_lost_engine_fails_the_stream(serve: Serve) -> None:
    served = serve(files={"chat_template.jinja": TEMPLATE}, token_s=0.05)
    served.wait_ready()
    with contextlib.closing(served.connect()) as connection:
        body = json.dumps({"messages": user("a"), "max_tokens": 90, "stream": True})
        connection.request("POST", "/v1/messages", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = b""
        while b"text_delta" not in raw:
            raw += response.readline()
        served.control(lose=True)
        raw += response.read()
    name, data = raw.decode().strip().split("\n\n")[-1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["error"]["type"]) == ("event: error", "error", "overloaded_error")
    assert "the engine process ended" in error["error"]["message"]


def test_a_stream_waits_for_the_model_with_pings(serve: Serve) -> None:
    served = serve(files={"chat_template.jinja": TEMPLATE}, heartbeat_s=0.1)
    served.control(hold=True)
    later = threading.Timer(2, lambda: served.control(hold=False))
    later.start()
    body = {"messages": user("say:hi"), "max_tokens": 5, "stream": True}
    raw = served.request("POST", "/v1/messages", body)[1]
    later.join()
    assert raw.count(b"event: ping") > 2
    events = parsed(raw)
    assert accumulated(events)[0][1] == "hi"
    assert events[-2].usage.input_tokens == 1


def test_a_client_that_leaves_ends_its_message(serve: Serve) -> None:
    served = serve(files={"chat_template.jinja": TEMPLATE}, token_s=0.05)
    served.wait_ready()
    for cancelled, streams in enumerate((True, False), 1):
        with contextlib.closing(served.connect()) as connection:
            body = json.dumps({"messages": user("a"), "max_tokens": 99, "stream": streams})
            connection.request("POST", "/v1/messages", body, {"Content-Type": "application/json"})
            if streams:
                connection.getresponse().read(10)
            else:
                served.until(lambda: served.metric("medusa_requests_in_flight") == 1)
        served.until(lambda n=cancelled: served.metric("medusa_engine_cancelled_total") == n)
    assert served.output().count("Traceback") == 0


def test_every_field_of_the_client_is_known() -> None:
    from anthropic.resources.beta.messages import Messages as Beta
    from anthropic.resources.messages import Messages

    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "user_profile_id", "workspace_id"}
    known = fields.WITHOUT_EFFECT | set(fields.REFUSED_FOR_MESSAGES)
    for messages in (Messages, Beta):
        assert not set(inspect.signature(messages.create).parameters) - own - fields.MESSAGES - known
        assert not set(inspect.signature(messages.count_tokens).parameters) - own - fields.COUNT_TOKENS - known
