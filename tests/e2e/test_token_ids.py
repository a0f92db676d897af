"""Token ids in answers, and prompts that are cut, in vLLM's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.forked
TEXTS = ["Return the naïve value", "def f"]
CHAT = {"messages": [{"role": "user", "content": "def f"}]}


@pytest.fixture(scope="module")
def serving(start_shared: Callable[..., Any], example: Path) -> Iterator[Any]:
    made = start_shared("--model", example)
    yield made
    assert made.stop() == 0


def ask(serving: Any, path: str, **body: Any) -> Any:
    status, answer, _ = serving.request("POST", path, {"max_tokens": 4, "temperature": 0} | body)
    assert status == 200, answer
    return answer


def chunks(serving: Any, path: str, **body: Any) -> list[Any]:
    lines = ask(serving, path, stream=True, **body).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def tokens(serving: Any, **body: Any) -> list[int]:
    found: list[int] = serving.request("POST", "/tokenize", body)[1]["tokens"]
    return found


@pytest.mark.parametrize("echo", [False, True])
def test_completions_have_the_ids_of_each_choice(serving: Any, echo: bool) -> None:
    asked = {"prompt": TEXTS, "n": 2, "seed": 5, "temperature": 1, "echo": echo, "return_token_ids": True}
    choices = ask(serving, "/v1/completions", **asked)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [
        tokens(serving, prompt=text) for text in TEXTS for _ in range(2)
    ]
    for number, choice in enumerate(choices):
        text = serving.request("POST", "/detokenize", {"tokens": choice["token_ids"]})[1]["prompt"]
        assert choice["text"] == echo * TEXTS[number // 2] + text.removesuffix("<|end|>")
        assert len(choice["token_ids"]) == 4 or choice["finish_reason"] == "stop"
    streamed: dict[int, list[Any]] = {number: [] for number in range(4)}
    for chunk in chunks(serving, "/v1/completions", **asked):
        [part] = chunk["choices"]
        streamed[part["index"]].append(part)
    for number, parts in streamed.items():
        assert list(chain.from_iterable(part.get("token_ids", []) for part in parts)) == choices[number]["token_ids"]
        shown = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
        assert shown == [choices[number]["prompt_token_ids"]]


def test_chats_have_the_ids_and_the_text_of_their_prompt(serving: Any) -> None:
    asked = CHAT | {"return_token_ids": True, "return_prompt_text": True}
    answer = ask(serving, "/v1/chat/completions", **asked)
    assert answer["prompt_text"] == "<|user|>def f<|assistant|>"
    assert answer["prompt_token_ids"] == tokens(serving, **CHAT)
    ids = answer["choices"][0]["token_ids"]
    found = chunks(serving, "/v1/chat/completions", **asked)
    assert [found[0][name] for name in ("prompt_text", "prompt_token_ids")] == [
        answer["prompt_text"],
        answer["prompt_token_ids"],
    ]
    assert list(chain.from_iterable(chunk["choices"][0].get("token_ids", []) for chunk in found)) == ids
    assert not any("prompt_token_ids" in chunk or "prompt_text" in chunk for chunk in found[1:])
    assert "token_ids" not in json.dumps(ask(serving, "/v1/chat/completions", **CHAT, return_token_ids=False))


def test_log_probabilities_show_ids_in_place_of_tokens(serving: Any) -> None:
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = ask(serving, "/v1/completions", prompt=TEXTS[1], echo=True, logprobs=1, **asked)["choices"][0]
    named = [f"token_id:{token}" for token in choice["prompt_token_ids"] + choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == named
    assert [next(iter(top)) for top in choice["logprobs"]["top_logprobs"][1:]] == named[1:]
    found = chunks(serving, "/v1/completions", prompt=TEXTS[1], echo=True, logprobs=1, **asked)
    assert list(chain.from_iterable(chunk["choices"][0]["logprobs"]["tokens"] for chunk in found)) == named
    answer = ask(serving, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=1, **asked)
    named = [f"token_id:{token}" for token in answer["choices"][0]["token_ids"]]
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [entry["top_logprobs"][0]["token"] for entry in content] == named
    plain = ask(serving, "/v1/chat/completions", **CHAT, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [entry["bytes"] for entry in plain]


@pytest.mark.parametrize("prompt", [TEXTS[0], [5, 6, 7, 8, 9]])
def test_prompts_are_cut(serving: Any, prompt: Any) -> None:
    ids = tokens(serving, prompt=prompt) if isinstance(prompt, str) else prompt
    for options, kept in (({}, ids[-3:]), ({"truncation_side": "right"}, ids[:3])):
        asked = {"prompt": prompt, "truncate_prompt_tokens": 3, **options}
        choice = ask(serving, "/v1/completions", **asked, return_token_ids=True)["choices"][0]
        assert choice["prompt_token_ids"] == kept
        cut, whole = (ask(serving, "/v1/completions", **body, echo=True) for body in (asked, {"prompt": kept}))
        assert (cut["choices"][0]["text"], cut["usage"]) == (whole["choices"][0]["text"], whole["usage"])


def test_long_prompts_are_cut_to_what_fits(serving: Any) -> None:
    long = "value " * 2000
    assert serving.request("POST", "/v1/completions", {"prompt": long})[0] == 400
    used = ask(serving, "/v1/completions", prompt=long, truncate_prompt_tokens=-1)["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (511, 1)
    messages = [{"role": "user", "content": long}]
    answer = ask(serving, "/v1/chat/completions", messages=messages, truncate_prompt_tokens=100, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens(serving, messages=messages)[-100:]
    for bad, field in (
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "top"}, "truncation_side"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        ({"truncate_prompt_tokens": 5, "messages": [{"role": "user", "content": "a" * 2_000_000}]}, "messages"),
    ):
        status, answer, _ = serving.request("POST", "/v1/chat/completions", CHAT | bad)
        assert (status, answer["error"]["param"]) == (400, field), answer
