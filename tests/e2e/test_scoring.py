"""Log-probabilities of prompts over HTTP: echo with logprobs, and prompt_logprobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.forked
TEXT = "Return the naïve value"


@pytest.fixture(scope="module")
def serving(start_shared: Callable[..., Any], example: Path) -> Iterator[Any]:
    made = start_shared("--model", example)
    yield made
    assert made.stop() == 0


def complete(serving: Any, **body: Any) -> Any:
    status, answer, _ = serving.request("POST", "/v1/completions", {"max_tokens": 0, "temperature": 0} | body)
    assert status == 200, answer
    return answer


def chunks(serving: Any, **body: Any) -> list[Any]:
    asked = {"max_tokens": 3, "temperature": 0, "stream": True} | body
    status, answer, _ = serving.request("POST", "/v1/completions", asked)
    assert status == 200, answer
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_echo_with_logprobs_scores_the_prompt(serving: Any) -> None:
    ids = serving.request("POST", "/tokenize", {"prompt": TEXT})[1]["tokens"]
    answer = complete(serving, prompt=TEXT, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    used = {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
    assert answer["usage"] == used | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert "".join(found["tokens"]) == TEXT
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    for offset, token, logprob, top in zip(
        found["text_offset"], *(found[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert TEXT[offset:].startswith(token)
        assert logprob is None or (top[token] == logprob and 2 <= len(top) <= 3)
    assert complete(serving, prompt=ids, echo=True, logprobs=2)["choices"] == answer["choices"]
    (longer,) = complete(serving, prompt=TEXT, echo=True, logprobs=2, max_tokens=1)["choices"]
    assert longer["text"].startswith(TEXT)
    assert longer["logprobs"]["token_logprobs"][: len(ids)] == pytest.approx(found["token_logprobs"], abs=1e-4)
    assert len(longer["logprobs"]["tokens"]) == len(ids) + 1
    assert "".join(longer["logprobs"]["tokens"]) == longer["text"]


def joined(choice: dict[str, Any]) -> str:
    """The text of a choice's tokens. The one that ends a text is among them, and not in the text."""
    return "".join(choice["logprobs"]["tokens"]).removesuffix("<|end|>")


def test_each_choice_of_many_prompts_has_its_own_prompt(serving: Any) -> None:
    prompts = ["Return the", "This function", "A"]
    choices = complete(serving, prompt=prompts, echo=True, logprobs=0, n=2, max_tokens=2, temperature=1)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice, prompt in zip(choices, [prompt for prompt in prompts for _ in range(2)], strict=True):
        assert choice["text"].startswith(prompt)
        assert joined(choice) == choice["text"]
    (best,) = complete(serving, prompt="Return", echo=True, logprobs=1, best_of=3, max_tokens=2, temperature=1)[
        "choices"
    ]
    assert joined(best) == best["text"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_is_the_whole_answer(serving: Any, count: int) -> None:
    asked = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 3}
    (whole,) = complete(serving, **asked)["choices"]
    for index in range(count):
        pieces = [
            choice
            for chunk in chunks(serving, **asked, n=count)
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        for name, values in whole["logprobs"].items():
            streamed = [value for piece in pieces for value in piece["logprobs"][name]]
            if name != "token_logprobs" and name != "top_logprobs":
                assert streamed == values
            assert len(streamed) == len(values)
    (only,) = chunks(serving, prompt=TEXT, echo=True, logprobs=1, max_tokens=0)
    assert (only["choices"][0]["text"], only["choices"][0]["finish_reason"]) == (TEXT, "length")
    assert (
        "".join(chunk["choices"][0]["text"] for chunk in chunks(serving, prompt=TEXT, echo=True, max_tokens=0)) == TEXT
    )


def test_prompt_logprobs_are_by_token_id_on_both_routes(serving: Any) -> None:
    ids = serving.request("POST", "/tokenize", {"prompt": TEXT})[1]["tokens"]
    (choice,) = complete(serving, prompt=TEXT, prompt_logprobs=2, max_tokens=1)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert (first, choice["logprobs"]) == (None, None)
    echoed = complete(serving, prompt=TEXT, echo=True, logprobs=2)["choices"][0]["logprobs"]
    assert "prompt_logprobs" not in complete(serving, prompt=TEXT, echo=True, logprobs=2)["choices"][0]
    for token, entries, logprob, text in zip(
        ids[1:], others, echoed["token_logprobs"][1:], echoed["tokens"][1:], strict=True
    ):
        own = entries[str(token)]
        assert own["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert own["decoded_token"] == text
        assert sorted(entry["rank"] for entry in entries.values())[:2] == [1, 2]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 0, "n": 2}
    status, answer, _ = serving.request("POST", "/v1/chat/completions", chat)
    assert status == 200, answer
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entries) == 1 for entries in answer["prompt_logprobs"][1:])


def test_what_lm_eval_asks_is_answered_as_by_transformers(start_shared: Callable[..., Any], example: Path) -> None:
    """The requests of lm-evaluation-harness 0.4.13, and its way to read the answers."""
    import torch
    from transformers import AutoModelForCausalLM

    serving = start_shared("--model", example, "--dtype", "float32")
    reference = AutoModelForCausalLM.from_pretrained(example, dtype=torch.float32).eval()
    pairs = [
        ("Return the", " value of the string"),
        ("This function", " banana"),
        ("naïve 日本", "語 😀 text"),
        ("A", " b"),
    ]
    contexts = [serving.request("POST", "/tokenize", {"prompt": first})[1]["tokens"] for first, _ in pairs]
    whole = [
        context + serving.request("POST", "/tokenize", {"prompt": second, "add_special_tokens": False})[1]["tokens"]
        for context, (_, second) in zip(contexts, pairs, strict=True)
    ]
    body = {"model": "pydoc-lm", "prompt": whole, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    choices = complete(serving, **body, echo=True)["choices"]
    for choice, ids, context in zip(choices, whole, contexts, strict=True):
        found = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, len(context) - 1 : -1].float()
        rows = torch.log_softmax(logits, -1)
        own = rows.gather(1, torch.tensor(ids[len(context) :])[:, None])[:, 0]
        assert sum(found) == pytest.approx(float(own.sum()), abs=1e-3)
        is_greedy = all(logprob == max(top.values()) for logprob, top in zip(found, tops, strict=True))
        assert is_greedy == bool((own >= rows.amax(1)).all())
    assert serving.stop() == 0


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens: expected a whole number of at least 1, or 0 with echo, found 0"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "or 0 with echo"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "of at least 0, found -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20, found -1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "to 20, found 21"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "a whole number"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "no stream"),
        ({"echo": True, "logprobs": 21}, "logprobs", "to 20, found 21"),
        ({"echo": "yes", "logprobs": 1}, "echo", "true or false"),
        ({"echo": True, "logprobs": 1, "max_tokens": 0, "prompt": [5] * 513}, "prompt", "which is more"),
        ({"echo": True, "logprobs": 1, "max_tokens": 0, "prompt": ""}, "prompt", "at least one token"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused(serving: Any, body: dict[str, Any], param: str, text: str) -> None:
    status, answer, _ = serving.request("POST", "/v1/completions", {"prompt": "a"} | body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert text in answer["error"]["message"]
