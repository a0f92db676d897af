"""The token streams of one API request."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest
from medusa_handler.model.generation import Generation
from medusa_handler.model.served_model import ServedModel
from medusa_runtime.engine.base import GenerateRequest, SamplingParams


class Stream:
    def __init__(self) -> None:
        self.closed = False

    def get(self, timeout_s: float) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_streams_are_cancelled_when_no_thread_can_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Stream] = []

    def generate(request: GenerateRequest) -> Stream:
        streams.append(Stream())
        return streams[-1]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = SimpleNamespace(generate=generate)
    model = cast("ServedModel", SimpleNamespace(engine=engine, most_characters=lambda: None))
    requests = [GenerateRequest(name, "text", SamplingParams(), True) for name in ("a", "b")]
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        Generation(model, requests, lambda: False)
    assert [stream.closed for stream in streams] == [True, True]
