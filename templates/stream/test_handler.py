"""The function as a platform runs it: a process of its own, called over HTTP."""

import json

import pytest
from medusa_adapters.trial import Trial


@pytest.fixture(scope="module")
def function():
    with Trial("--handler", "handler.py") as function:
        yield function


def test_streams_each_line(function):
    events = function.events("/", json.dumps({"text": "one two\nthree"}))
    assert [json.loads(event) for event in events] == [
        {"line": 1, "words": 2},
        {"line": 2, "words": 1},
        {"total": 3},
    ]


def test_refuses_what_is_no_text(function):
    for body in ({"text": 3}, {"text": "a", "delay_s": "long"}, ["text"]):
        assert function.post("/", json.dumps(body)).status == 400
