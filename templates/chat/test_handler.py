"""The handler with a scripted model, and, where MEDUSA_MODEL names a checkpoint, the served function."""

import json
import os

import pytest
from medusa_adapters.trial import Trial
from medusa_handler import Context, HttpError, Request

from handler import SYSTEM, Handler

HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}


class ScriptedModel:
    def stream_chat(self, messages, **sampling):
        self.asked = messages, sampling
        yield from ("Hello", " you")


def ask(body):
    handler = Handler()
    handler.load(Context(model=ScriptedModel()))
    return handler, handler.predict(Request(body=json.dumps(body).encode()))


def test_answers_under_the_system_prompt():
    handler, answer = ask(HELLO | {"max_tokens": 9})
    assert "".join(answer) == "Hello you"
    assert handler.model.asked == ([SYSTEM, *HELLO["messages"]], {"max_tokens": 9})


def test_refuses_an_empty_conversation():
    for messages in ([], "hello", ["hello"], None):
        with pytest.raises(HttpError):
            ask({"messages": messages})


@pytest.mark.skipif("MEDUSA_MODEL" not in os.environ, reason="set MEDUSA_MODEL to a checkpoint to serve it")
def test_served():
    with Trial("--handler", "handler.py") as function:
        assert "".join(function.events("/", json.dumps(HELLO | {"max_tokens": 4})))
        assert function.post("/", "{}").status == 400
