"""Requests for more sequences than an instance can ever admit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Serve = Callable[..., Any]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_more_sequences_than_an_instance_has_places_for_are_refused_at_once(serve: Serve) -> None:
    served = serve(max_concurrency=1, max_waiting=2, files={"chat_template.jinja": TEMPLATE})
    served.wait_ready()
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 4}
    for path, body, param in (
        ("completions", {"prompt": "a", "n": 4}, "n"),
        ("completions", {"prompt": ["a", "b"], "n": 2}, "prompt"),
        ("completions", {"prompt": "a", "best_of": 4}, "n"),
        ("chat/completions", chat, "n"),
    ):
        status, answer, _ = served.request("POST", f"/v1/{path}", {"model": "words", "max_tokens": 1, **body})
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["message"].startswith("expected at most 3 sequences, found ")
    assert served.request("POST", "/v1/completions", {"model": "words", "prompt": "a", "n": 3})[0] == 200


def test_many_token_ids_for_many_sequences_are_refused(serve: Serve) -> None:
    served = serve()
    served.wait_ready()
    allowed = list(range(9000))
    for field, value in (("allowed_token_ids", allowed), ("logit_bias", dict.fromkeys(map(str, allowed), 1))):
        body = {"model": "words", "prompt": "a", "max_tokens": 1, "n": 128, field: value}
        status, answer, _ = served.request("POST", "/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert "expected at most 1,048,576 token ids in all sequences together, found 1,152,000" in str(answer)
