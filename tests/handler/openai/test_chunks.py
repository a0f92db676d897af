"""What vLLM's fields and headers change in an answer: its id, its chunks' usage, and whose message it is."""

from __future__ import annotations

from typing import Any

import openai

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(model="words", prompt="a", max_tokens=3, stream=True, stream_options=options)
    )
    assert [chunk.usage and chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3]
    messages: Any = [{"role": "user", "content": "a"}]
    asked = client.chat.completions.create(
        model="words", messages=messages, max_tokens=2, n=2, stream=True, stream_options=options
    )
    *chunks, last = [chunk for chunk in asked if chunk.usage is not None]
    prompt = last.usage.prompt_tokens
    assert prompt > 0
    found = [[c.usage.prompt_tokens for c in chunks if c.choices[0].index == index] for index in (0, 1)]
    assert found == [[prompt] * 3] * 2  # also before the first token
    found = [[c.usage.completion_tokens for c in chunks if c.choices[0].index == index] for index in (0, 1)]
    assert found == [[0, 1, 2]] * 2  # each of its choice alone
    assert last.usage.completion_tokens == 4


def test_an_answer_that_is_not_prompted_for_is_the_last_messages(served: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for prompted, role in ((True, "assistant"), (False, "user")):
        asked = body | {"add_generation_prompt": prompted}
        answer = served.request("POST", "/v1/chat/completions", asked)[1]
        assert answer["choices"][0]["message"]["role"] == role


def test_an_answers_id_has_the_requests(served: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": 1}
    for path, body, kind in (
        ("/v1/completions", asked | {"prompt": "a"}, "cmpl"),
        ("/v1/chat/completions", asked | {"messages": [{"role": "user", "content": "a"}]}, "chatcmpl"),
    ):
        header = {"X-Request-Id": "from-header"}
        found = [
            served.request("POST", path, body | more, headers)
            for more, headers in (({}, header), ({"request_id": "own"}, header), ({"request_id": "own"}, {}), ({}, {}))
        ]
        ids = [answer["id"] for _, answer, _ in found]
        assert ids[:3] == [f"{kind}-from-header", f"{kind}-from-header", f"{kind}-own"]
        assert ids[3] == f"{kind}-{found[3][2]['x-request-id']}"
