"""A prompt that begins like an earlier one, through real processes: what answers say of it, and who shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

pytestmark = pytest.mark.forked

Start = Callable[..., Any]
QUESTION = "Return the length of a list, the number of its items, and the sum of the items. " * 4
ANSWER: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "extra_body": {"ignore_eos": True}}


def client_of(serving: Any, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{serving.port}/v1", api_key=key, max_retries=0, timeout=60)


def completion(client: openai.OpenAI, *, stream: bool = False, **fields: Any) -> Any:
    """The usage of a completion."""
    asked: dict[str, Any] = {"model": client.models.list().data[0].id, "prompt": QUESTION, **ANSWER}
    asked["extra_body"] = {**asked["extra_body"], **fields}
    if not stream:
        return client.completions.create(**asked).usage
    *_, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    return last.usage


def cached(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


def test_callers_share_with_themselves_and_with_those_who_know_the_salt(
    start: Start, example: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\nother\n")
    serving = start("--model", example, "--api-key-file", keys)
    with client_of(serving, "one") as one, client_of(serving, "other") as other:
        first = completion(one)
        whole = (first.prompt_tokens - 1) // 16 * 16
        assert whole > 32
        assert [cached(first), cached(completion(one)), cached(completion(one, stream=True))] == [0, whole, whole]
        assert [cached(completion(other)), cached(completion(other))] == [0, whole]
        salted = [cached(completion(each, cache_salt="ours")) for each in (one, other, one)]
        assert salted == [0, whole, whole]
        assert cached(completion(other, cache_salt="mine")) == 0
        for wrong in ("", 7, "x" * 1025, ["a"]):
            with pytest.raises(openai.BadRequestError, match="cache_salt: expected a text of 1 to 1024 characters"):
                completion(one, cache_salt=wrong)
    assert counted(serving) == 5 * whole


def counted(serving: Any) -> int:
    """The tokens of all prompts that were found."""
    lines = serving.exchange("GET", "/metrics", headers={"Authorization": "Bearer one"}).body.decode().splitlines()
    [found] = [line for line in lines if line.startswith("medusa_engine_cached_tokens_total")]
    return int(float(found.split()[-1]))


@pytest.mark.parametrize("kind", ["plain", "stream", "async", "batch"])
def test_a_functions_callers_share_with_themselves(kind: str, start: Start, example: Path, tmp_path: Path) -> None:
    keys, code = tmp_path / "keys", tmp_path / "handler.py"
    keys.write_text("one\nother\n")
    code.write_text(
        "from medusa_handler import batch\n\n\n"
        "def plain(request, context):\n    return context.model.generate(request.body, max_tokens=1)\n\n\n"
        "def stream(request, context):\n    yield from context.model.stream(request.body, max_tokens=1)\n\n\n"
        "async def later(request, context):\n    return context.model.generate(request.body, max_tokens=1)\n\n\n"
        "class Batch:\n    def load(self, context):\n        self.model = context.model\n\n"
        "    @batch(max_size=4, max_wait_ms=0)\n    def predict(self, requests):\n"
        "        return [self.model.generate(request.body, max_tokens=1) for request in requests]\n"
    )
    name = {"async": "later", "batch": "Batch"}.get(kind, kind)
    serving = start("--model", example, "--handler", f"{code}:{name}", "--api-key-file", keys)
    found = []
    for key in ("one", "other", "other"):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "text/plain"}
        assert serving.exchange("POST", "/", QUESTION.encode(), headers=headers).status == 200
        found.append(counted(serving))
    assert found[:2] == [0, 0]
    assert found[2] > 32


def test_every_interface_says_what_was_found(start: Start, example: Path) -> None:
    serving = start("--model", example)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    url = f"http://127.0.0.1:{serving.port}"
    greedy = {"temperature": 0}
    with client_of(serving, "none") as client, anthropic.Anthropic(base_url=url, api_key="none") as claude:
        model = client.models.list().data[0].id
        chat = client.chat.completions.create(model=model, messages=messages, **ANSWER)
        again = client.chat.completions.create(model=model, messages=messages, n=2, **ANSWER)
        whole = (chat.usage.prompt_tokens - 1) // 16 * 16
        assert [cached(chat.usage), cached(again.usage)] == [0, whole]
        assert again.usage.prompt_tokens == chat.usage.prompt_tokens
        messages += [{"role": "assistant", "content": chat.choices[0].message.content}]
        messages += [{"role": "user", "content": "And of a string?"}]
        turn = client.chat.completions.create(model=model, messages=messages, **ANSWER)
        assert cached(turn.usage) >= whole
        response = client.responses.create(model=model, input=QUESTION, max_output_tokens=4)
        assert response.usage.input_tokens_details.cached_tokens >= 32
        message = claude.messages.create(model=model, messages=messages[:1], max_tokens=4, extra_body=greedy)
        assert message.usage.cache_read_input_tokens == whole
        assert message.usage.input_tokens == chat.usage.prompt_tokens - whole
        with claude.messages.stream(model=model, messages=messages[:1], max_tokens=4, extra_body=greedy) as stream:
            assert stream.get_final_message().usage == message.usage
    assert serving.stop() == 0


def test_nothing_is_kept_if_it_may_not_be(start: Start, example: Path) -> None:
    serving = start("--model", example, "--prefix-cache-mb", "0")
    with client_of(serving, "none") as client:
        assert [cached(completion(client)) for _ in range(3)] == [0, 0, 0]
    assert serving.stop() == 0
