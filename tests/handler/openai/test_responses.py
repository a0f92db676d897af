"""/v1/responses, as the official client sees it: its types, its accumulated streams, and a round of tools."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from medusa_handler.openai.answer import Choice
from medusa_handler.openai.body import fields
from medusa_handler.openai.responses.output import response_output
from medusa_handler.openai.tools.formats import NamedCallParser
from medusa_runtime.engine.base import Delta
from openai.types.responses import Response, ResponseFunctionToolCallOutputItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

Serve = Callable[..., Any]
TEMPLATE = (
    "{# tools: <tool_call> #}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
TIME: Any = {"type": "function", "name": "time", "parameters": None, "strict": None}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OUR_OWN = {"store"}  # a field that OpenAI sends, and that its types leave out


def extras(value: Any) -> set[str]:
    """Return the fields that the client's types do not have."""
    if isinstance(value, list):
        return set().union(*map(extras, value))
    if not isinstance(value, BaseModel):
        return set()
    own = set(value.model_extra or {})
    return own.union(*(extras(each) for _, each in value))


def respond(served: Any, **body: Any) -> Response:
    status, answer, _ = served.request("POST", "/v1/responses", body)
    assert status == 200, answer
    found = Response.model_validate(answer, strict=True)
    assert extras(found) <= OUR_OWN
    return found


def stream(served: Any, **body: Any) -> list[Any]:
    status, raw, headers = served.request("POST", "/v1/responses", body | {"stream": True})
    assert status == 200, raw
    assert headers["content-type"].startswith("text/event-stream")
    return parsed(raw)


def parsed(raw: bytes) -> list[Any]:
    """Return the events of a stream, each checked against the client's type of its name."""
    found = []
    for block in raw.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name, data = lines
        event = EVENTS.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}" == f"event: {json.loads(data.removeprefix('data: '))['type']}"
        assert extras(event) <= OUR_OWN
        found.append(event)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


def without_ids(items: Any) -> Any:
    return [item.model_dump(exclude={"id", "call_id"}) for item in items]


def test_a_text_is_answered(served: Any) -> None:
    served.prompts()
    found = respond(served, model="words", input="hi", instructions="Be short.", max_output_tokens=3, user="u")
    assert found.output_text == "w0 w1 w2"
    assert served.prompts() == [repr("<system>Be short.<user>hi<assistant>")]
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert found.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert (found.id[:5], found.output[0].id[:4], found.model) == ("resp_", "msg_", "words")  # type: ignore[index]
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (2, 3, 5)
    assert (found.instructions, found.max_output_tokens, found.user) == ("Be short.", 3, "u")
    assert (found.temperature, found.top_p, found.truncation, found.tools) == (1.0, 1.0, "disabled", [])
    done = respond(served, input="say:done", metadata={"a": "b"})
    assert (done.status, done.output_text, done.metadata, done.incomplete_details) == (
        "completed", "done", {"a": "b"}, None,
    )  # fmt: skip
    assert done.completed_at is not None


def test_items_become_messages(served: Any) -> None:
    served.prompts()
    respond(
        served,
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {
                "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                "content": [{"type": "output_text", "text": "c", "annotations": []}],
            },
            {"type": "function_call", "call_id": "x1", "name": "weather", "arguments": '{"city": "Rom"}', "id": "fc_1"},
            {"type": "function_call", "call_id": "x2", "name": "weather", "arguments": '{"city": "Bonn"}'},
            {"type": "function_call_output", "call_id": "x1", "output": "rain"},
            {"type": "function_call_output", "call_id": "x2", "output": [{"type": "input_text", "text": "sun"}]},
            {"type": "function_call", "call_id": "x3", "name": "weather", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "x3", "output": ""},
        ],
    )  # fmt: skip
    assert served.prompts() == [
        repr(
            "<system>Be kind.<user>a\nb<assistant>c[x1 weather Rom][x2 weather Bonn]<tool>rain<tool>sun"
            "<assistant>[x3 weather ]<tool><assistant>"
        )
    ]


def test_a_stream_has_every_event_of_a_text(served: Any) -> None:
    events = stream(served, input="say:hello you")
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hello you"
    last = events[-1].response
    assert (last.output_text, last.status) == ("hello you", "completed")
    assert last.usage.output_tokens == 3
    assert [event.response.status for event in events[:2]] == ["in_progress"] * 2
    assert {event.item_id for event in events[3:-2]} == {last.output[0].id}
    assert len({event.response.id for event in (*events[:2], events[-1])}) == 1
    assert without_ids(respond(served, input="say:hello you").output) == without_ids(last.output)


def test_a_cut_stream_is_incomplete(served: Any) -> None:
    events = stream(served, input="a", max_output_tokens=2)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.output[0].status == "incomplete"
    assert events[-1].response.output_text == "w0 w1"


def test_an_answer_without_text_is_an_empty_message(served: Any) -> None:
    events = stream(served, input="a", stop=["w0"])
    assert events[-1].response.output[0].content[0].text == ""
    assert events[-1].type == "response.completed"
    assert respond(served, input="a", stop=["w0"]).output[0].content[0].text == ""  # type: ignore[union-attr]


CALLS = [
    (CALL, [("weather", '{"city": "Köln"}')]),
    (f"Well. {CALL}", ["Well.", ("weather", '{"city": "Köln"}')]),
    (f'{CALL}\n<tool_call>{{"name": "time"}}</tool_call> Done.', [
        ("weather", '{"city": "Köln"}'), ("time", "{}"), " Done.",
    ]),
    ("no call", ["no call"]),
    ("<tool_call>no call</tool_call>", ["<tool_call>no call</tool_call>"]),
]  # fmt: skip


@pytest.mark.parametrize(("said", "expected"), CALLS)
def test_calls_are_items(served: Any, said: str, expected: list[Any]) -> None:
    asked = {"input": f"say:{said}", "tools": [WEATHER, TIME]}
    whole = respond(served, **asked)
    shown = [item.content[0].text if item.type == "message" else (item.name, item.arguments) for item in whole.output]  # type: ignore[union-attr]
    assert shown == expected
    assert {item.status for item in whole.output} == {"completed"}  # type: ignore[union-attr]
    events = stream(served, **asked)
    assert without_ids(events[-1].response.output) == without_ids(whole.output)
    for index, item in enumerate(events[-1].response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert own[-1].item == item
        assert {event.item_id for event in own[1:-1]} == {item.id}
        pieces = "".join(event.delta for event in own if event.type.endswith("delta"))
        assert pieces == (item.content[0].text if item.type == "message" else item.arguments)
        # One item after the other: each is done before the next begins.
        assert [event.sequence_number for event in own] == list(
            range(own[0].sequence_number, own[0].sequence_number + len(own))
        )


@pytest.mark.parametrize(("said", "status"), [('{"city": "Kö', "incomplete"), ('{"city": "Köln"}', "completed")])
def test_a_call_that_is_cut_is_incomplete(said: str, status: str) -> None:
    output = response_output(NamedCallParser("weather"), parallel=True, alternatives=None)
    choice = Choice()
    choice.add(Delta("id", said))
    events = [*output.add(choice), *output.finish("incomplete")]
    assert output.items[0]["status"] == status
    assert (events[-2]["arguments"], events[-1]["item"]["arguments"]) == (said, said)


def test_only_the_first_call_counts_without_parallel_ones(served: Any) -> None:
    found = respond(served, input=f"say:{CALL}{CALL}", tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in found.output] == ["function_call"]
    assert found.parallel_tool_calls is False


def test_the_client_runs_a_round_of_tools(client: openai.OpenAI, served: Any) -> None:
    class Weather(BaseModel):
        city: str

    tool = openai.pydantic_function_tool(Weather, name="weather")["function"]
    asked: Any = {"model": "words", "tools": [{"type": "function", **tool}]}
    items: Any = [{"role": "user", "content": f"say:{CALL}"}]
    with client.responses.stream(input=items, **asked) as events:
        snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
        answer = events.get_final_response()
    assert snapshots[-1] == '{"city": "Köln"}'
    call = answer.output[0]
    assert call.type == "function_call"
    items += answer.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "say:sunny"})
    served.prompts()
    second = client.responses.parse(input=items, **asked)
    assert "<tool>say:sunny<assistant>" in served.prompts()[0]
    items += second.output
    assert client.responses.create(input=items, **asked).output


def test_all_fields_of_the_clients_items_may_be_sent_back(client: openai.OpenAI, served: Any) -> None:
    tools: Any = [WEATHER]
    answer = client.responses.create(model="words", input=f"say:on{CALL}", tools=tools)
    items: Any = [item.model_dump() for item in answer.output]
    assert [item["type"] for item in items] == ["message", "function_call"]
    assert items[1].keys() > {"caller", "namespace"}
    output = ResponseFunctionToolCallOutputItem(
        id="fco_1", call_id=items[1]["call_id"], output="say:sunny", status="completed", type="function_call_output"
    )
    assert client.responses.create(model="words", input=[*items, output.model_dump()], tools=tools).output  # type: ignore[list-item]
    status, body, _ = served.request("POST", "/v1/responses", {"input": [items[0] | {"caller": "x"}]})
    assert (status, body["error"]["param"]) == (400, "input[0].caller")


def test_the_client_parses_a_form(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        city: str

    said = 'say:{"city": "Rom"}'
    found = client.responses.parse(model="words", input=said, text_format=Answer)
    assert found.output_parsed == Answer(city="Rom")
    with client.responses.stream(model="words", input=said, text_format=Answer) as events:
        assert events.get_final_response().output_parsed == Answer(city="Rom")
    items: Any = [{"role": "user", "content": said}, *found.output, {"role": "user", "content": "and?"}]
    assert client.responses.parse(model="words", input=items, max_output_tokens=9).output_text


def test_log_probabilities_come_with_each_token(served: Any) -> None:
    include = ["message.output_text.logprobs"]
    found = respond(served, input="a", include=include, top_logprobs=1, max_output_tokens=2)
    logprobs = found.output[0].content[0].logprobs  # type: ignore[union-attr, index]
    assert [(each.token, each.logprob, each.top_logprobs[0].token) for each in logprobs] == [
        ("w0", -0.5, "alt0"),
        (" w1", -0.5, "alt0"),
    ]
    for said in ("say:hello", f"say:Well. {CALL}"):
        events = stream(served, input=said, include=include, tools=[WEATHER])
        deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
        [done] = [event for event in events if event.type == "response.output_text.done"]
        assert [each.token for each in deltas] == [each.token for each in done.logprobs]
        assert "".join(each.token for each in deltas).startswith(done.text[:5])
        part = events[-1].response.output[0].content[0]
        assert [each.token for each in part.logprobs] == [each.token for each in done.logprobs]
    assert respond(served, input="a").output[0].content[0].logprobs == []  # type: ignore[union-attr, index]


def test_the_effort_reaches_the_template(serve: Serve) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %} {{ reasoning_effort }} {{ enable_thinking }}"
    served = serve(files={"chat_template.jinja": template})
    served.wait_ready()
    assert respond(served, input="x", reasoning={"effort": "low", "summary": None}).reasoning.effort == "low"  # type: ignore[union-attr]
    assert served.prompts() == ["'x low True'"]


def test_old_turns_are_left_out_on_request(served: Any) -> None:
    served.prompts()
    turns: list[Any] = [{"role": "system", "content": "Be kind."}]
    for number in range(30):
        turns += [{"role": "user", "content": f"question {number} ?"}, {"role": "assistant", "content": "an answer !"}]
    turns.append({"role": "user", "content": "the last question"})
    status, answer, _ = served.request("POST", "/v1/responses", {"input": turns})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "input")
    served.prompts()
    assert respond(served, input=turns, truncation="auto", max_output_tokens=5).truncation == "auto"
    [kept] = served.prompts()
    assert kept.startswith("'<system>Be kind.<user>question ")
    assert kept.endswith("<user>the last question<assistant>'")
    assert 90 <= len(kept.split()) <= 95  # of a context of 100 tokens, in which each word is one
    status, answer, _ = served.request("POST", "/v1/responses", {"input": "a " * 200, "truncation": "auto"})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    long: list[Any] = [{"role": "user", "content": "long " * 300_000}, {"role": "assistant", "content": "!"}, turns[-1]]
    status, answer, _ = served.request("POST", "/v1/responses", {"input": long})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "input")
    served.prompts()
    assert respond(served, input=long, truncation="auto", max_output_tokens=5).truncation == "auto"
    assert served.prompts() == ["'<user>the last question<assistant>'"]


def test_the_tokens_of_a_prompt_are_counted_without_an_answer(served: Any) -> None:
    body = {"input": "a question ?", "instructions": "Be kind."}
    status, counted, _ = served.request("POST", "/v1/responses/input_tokens", body)
    assert status == 200
    assert counted == {"object": "response.input_tokens", "input_tokens": respond(served, **body).usage.input_tokens}  # type: ignore[union-attr]
    status, answer, _ = served.request("POST", "/v1/responses/input_tokens", body | {"temperature": 1})
    assert (status, answer["error"]["code"]) == (400, "unknown_parameter")
    status, answer, _ = served.request("POST", "/v1/responses/input_tokens", {"input": 3})
    assert (status, answer["error"]["param"]) == (400, "input")
    status, answer, _ = served.request("POST", "/v1/responses/input_tokens", {"input": "a", "model": "other"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_what_asks_for_nothing_is_accepted(served: Any) -> None:
    found = respond(
        served, input="a", max_output_tokens=1, store=True, background=False, previous_response_id=None, n=1,
        conversation=None, service_tier="flex", prompt_cache_key="k", safety_identifier="s", max_tool_calls=3,
        include=["reasoning.encrypted_content"], text={"format": {"type": "text"}, "verbosity": "medium"}, tools=[],
        tool_choice=None, reasoning={"summary": None}, stream_options={"include_obfuscation": False},
    )  # fmt: skip
    assert (found.prompt_cache_key, found.safety_identifier, found.tool_choice) == ("k", "s", "auto")
    assert found.store is False  # type: ignore[attr-defined]


def test_only_allowed_tools_are_offered(serve: Serve) -> None:
    template = "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    served = serve(files={"chat_template.jinja": template})
    served.wait_ready()
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    for body in ({"tool_choice": choice}, {"tool_choice": "none"}, {}):
        respond(served, input="x", tools=[WEATHER, TIME], max_output_tokens=1, **body)
    assert served.prompts() == ["'time '", "''", "'weather time '"]


def test_every_field_of_the_client_is_known() -> None:
    import inspect

    from openai.resources.responses import Responses

    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    asked = set(inspect.signature(Responses.create).parameters) - own
    assert not asked - fields.RESPONSES - fields.WITHOUT_EFFECT - set(fields.REFUSED_FOR_RESPONSES)


def test_a_lost_engine_fails_the_stream(serve: Serve) -> None:
    served = serve(files={"chat_template.jinja": TEMPLATE}, token_s=0.05)
    served.wait_ready()
    with contextlib.closing(served.connect()) as connection:
        body = json.dumps({"input": "a", "max_output_tokens": 90, "stream": True})
        connection.request("POST", "/v1/responses", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = b""
        while b"output_text.delta" not in raw:
            raw += response.readline()
        served.control(lose=True)
        events = parsed(raw + response.read())
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert (failed.status, failed.error.code, failed.error.type) == (
        "failed",
        "server_error",
        "Engine.Failed",
    )
    assert "the engine process ended" in failed.error.message


def test_a_stream_waits_for_the_model_with_heartbeats(serve: Serve) -> None:
    served = serve(files={"chat_template.jinja": TEMPLATE}, ready=False, heartbeat_s=0.1)
    later = threading.Timer(0.5, lambda: served.control(ready=True))
    later.start()
    assert stream(served, input="say:hi")[-1].response.output_text == "hi"
    later.join()
    late = {"input": "a " * 200, "stream": True}
    with contextlib.closing(served.connect()) as connection:
        served.control(ready=False)
        connection.request("POST", "/v1/responses", json.dumps(late), {"Content-Type": "application/json"})
        response = connection.getresponse()  # its head comes before the engine has seen the request
        later = threading.Timer(0.3, lambda: served.control(ready=True))
        later.start()
        raw = response.read()
        later.join()
    assert b": waiting" in raw
    assert b"event: response.failed" in raw
    assert b'"code":"invalid_prompt"' in raw
    assert b'"param":"input"' in raw


def test_a_client_that_leaves_ends_its_response(serve: Serve) -> None:
    served = serve(files={"chat_template.jinja": TEMPLATE}, token_s=0.05)
    served.wait_ready()
    for cancelled, streams in enumerate((True, False), 1):
        with contextlib.closing(served.connect()) as connection:
            body = json.dumps({"input": "a", "max_output_tokens": 99, "stream": streams})
            connection.request("POST", "/v1/responses", body, {"Content-Type": "application/json"})
            if streams:
                connection.getresponse().read(10)
            else:
                served.until(lambda: served.metric("medusa_requests_in_flight") == 1)
        served.until(lambda n=cancelled: served.metric("medusa_engine_cancelled_total") == n)
    assert served.output().count("Traceback") == 0


def test_post_to_the_root_and_what_is_not_kept(served: Any) -> None:
    status, answer, _ = served.request("POST", "/", {"input": "say:hi"})
    assert (status, answer["object"], answer["output"][0]["content"][0]["text"]) == (200, "response", "hi")
    status, answer, _ = served.request("GET", "/v1/responses/resp_1")
    assert status == 404
    assert "not stored" in answer["error"]["message"]
    assert served.request("GET", "/v1/responses")[0] == 405
