"""Log-probabilities of prompts, allowed tokens and bad words: the torch engine's answers beside vLLM's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]
TEXTS = ("Return the naïve value of a 日本語 😀 string", "This function")
CLOSE = 0.15  # both compute in bfloat16, in another order
EXTRA = {"token_ids", "prompt_token_ids", "routed_experts"}  # vLLM's fields for what was not asked for


@pytest.fixture(scope="module")
def servers(start_shared: Callable[..., Any], example: Path) -> Iterator[tuple[Any, Any]]:
    torch = start_shared("--model", example)
    vllm = start_shared("--model", example, "--engine", "vllm", "--kv-cache-mb", "64")
    yield torch, vllm
    assert (torch.stop(), vllm.stop()) == (0, 0)


def both(servers: tuple[Any, Any], path: str = "/v1/completions", **body: Any) -> tuple[Any, Any]:
    answers = [served.request("POST", path, {"temperature": 0} | body, PATIENCE_S) for served in servers]
    assert [status for status, _, _ in answers] == [200, 200], answers
    ours, theirs = (answer for _, answer, _ in answers)
    return ours, theirs


def same(ours: Any, theirs: Any, at: str = "") -> None:
    """Check that two JSON values are the same, but for small differences of log-probabilities and their order."""
    if isinstance(ours, dict):
        assert isinstance(theirs, dict), at
        if at.endswith(("top_logprobs", "prompt_logprobs")):
            ours, theirs = alternatives(ours), alternatives(theirs)
        assert {name for name in theirs if name not in EXTRA} == set(ours), at
        for name, value in ours.items():
            same(value, theirs[name], f"{at}.{name}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), at
        for one, other in zip(ours, theirs, strict=True):
            same(one, other, at)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, abs=CLOSE), at
    elif at.endswith(".rank"):
        assert ours == pytest.approx(theirs, rel=0.2, abs=2), at
    else:
        assert ours == theirs, at


def alternatives(found: dict[str, Any]) -> dict[str, Any]:
    """The alternatives of a token, best first, without their names where two are about as likely."""

    def value(entry: Any) -> float:
        return float(entry["logprob"] if isinstance(entry, dict) else entry)

    entries = sorted(found.items(), key=lambda item: -value(item[1]))
    return {
        str(place) if isinstance(entry, float) or is_close(place, entries, value) else name: (
            value(entry) if is_close(place, entries, value) else entry
        )
        for place, (name, entry) in enumerate(entries)
    }


def is_close(place: int, entries: list[Any], value: Callable[[Any], float]) -> bool:
    own = value(entries[place][1])
    return any(abs(value(entry) - own) < CLOSE for at, (_, entry) in enumerate(entries) if at != place)


def choices(ours: Any, theirs: Any, *, asked: bool) -> tuple[list[Any], list[Any]]:
    """The choices without the prompt's log-probabilities by id, which vLLM also gives where nobody asks for them."""
    if not asked:
        for choice in theirs["choices"]:
            choice.pop("prompt_logprobs", None)
    return ours["choices"], theirs["choices"]


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_echo_with_logprobs(servers: tuple[Any, Any], count: int, tokens: int) -> None:
    ours, theirs = both(servers, prompt=list(TEXTS), echo=True, logprobs=count, max_tokens=tokens)
    same(*choices(ours, theirs, asked=False))
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
    # vLLM generates a token for max_tokens=0, does not return it, and counts it.
    assert ours["usage"]["completion_tokens"] == (0 if tokens == 0 else theirs["usage"]["completion_tokens"])


def test_echo_of_token_ids(servers: tuple[Any, Any]) -> None:
    ids = servers[0].request("POST", "/tokenize", {"prompt": TEXTS[0]})[1]["tokens"]
    same(*choices(*both(servers, prompt=ids, echo=True, logprobs=1, max_tokens=1), asked=False))
    same(*choices(*both(servers, prompt=[ids, ids[:3]], echo=True, logprobs=1, max_tokens=0), asked=False))


def test_prompt_logprobs(servers: tuple[Any, Any]) -> None:
    for count in (0, 2):
        same(*choices(*both(servers, prompt=TEXTS[0], prompt_logprobs=count, max_tokens=2), asked=True))
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 1}
    ours, theirs = both(servers, "/v1/chat/completions", **chat)
    same(ours["prompt_logprobs"], theirs["prompt_logprobs"], "prompt_logprobs")


@pytest.mark.parametrize("tokens", [0, 3])
def test_echo_in_a_stream(servers: tuple[Any, Any], tokens: int) -> None:
    found = []
    for served in servers:
        body = {"prompt": TEXTS[0], "echo": True, "logprobs": 2, "max_tokens": tokens, "temperature": 0, "stream": True}
        status, answer, _ = served.request("POST", "/v1/completions", body, PATIENCE_S)
        assert status == 200, answer
        lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        found.append([json.loads(line)["choices"][0] for line in lines])
    ours, theirs = found
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("index", "text", "finish_reason"):
            assert one[name] == other.get(name)
        same(one["logprobs"], other["logprobs"])


@pytest.mark.parametrize(
    "body",
    [
        {"allowed_token_ids": [359, 263, 294]},
        {"allowed_token_ids": [359, 263, 294], "logit_bias": {"294": 100}},
        {"bad_words": ["value", "the"]},
        {"bad_words": ["of the"], "logprobs": 1},
        {"bad_words": ["e"], "allowed_token_ids": list(range(100, 2048))},
    ],
)
def test_allowed_tokens_and_bad_words(servers: tuple[Any, Any], body: dict[str, Any]) -> None:
    ours, theirs = both(servers, prompt=TEXTS[1], max_tokens=12, **body)
    same(*choices(ours, theirs, asked=False))


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 0},
        {"prompt_logprobs": -2},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": 1, "stream": True},
        {"echo": True, "logprobs": 21},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [2048]},
        {"bad_words": [""]},
        {"bad_words": [" "]},
        {"bad_words": ["ab"] * 3 + [f"x{number}" for number in range(130)]},
    ],
)
def test_what_vllm_refuses_is_refused(servers: tuple[Any, Any], body: dict[str, Any]) -> None:
    for served in servers:
        status, answer, _ = served.request("POST", "/v1/completions", {"prompt": "a"} | body, PATIENCE_S)
        assert status == 400, answer
