"""What a checkpoint's generation_config.json may choose for requests that leave a field out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Serve = Callable[..., Any]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_what_no_request_may_have_is_left_out(serve: Serve) -> None:
    """Every request that left a field out was refused, in words about a value that it did not have."""
    generation = {"temperature": -1, "top_p": float("nan"), "top_k": 10**30, "repetition_penalty": 0, "min_p": 1e400}
    served = serve(files={"chat_template.jinja": TEMPLATE, "generation_config.json": json.dumps(generation)})
    answer = served.request("POST", "/v1/responses", {"input": "a", "max_output_tokens": 2})[1]
    assert (answer["status"], answer["temperature"], answer["top_p"]) == ("incomplete", 1.0, 1.0), answer
