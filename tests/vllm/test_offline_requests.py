"""Offline work that lets an engine serve: its result, and what ends it."""

from __future__ import annotations

from typing import Any

import pytest
from answering_engine import AnsweringEngine
from medusa_runtime.engine.base import SamplingParams
from medusa_runtime.errors import DeviceError, EngineError
from medusa_vllm.offline import complete, serve_beside

PARAMS = SamplingParams(max_tokens=2)


def test_the_engine_serves_until_the_work_is_done() -> None:
    engine: Any = AnsweringEngine()
    assert serve_beside(engine, lambda: complete(engine, [[1], [2, 3]], PARAMS, "r") or "done") == "done"
    assert engine.asked == [(1,), (2, 3)]


def test_a_request_that_is_not_completed_ends_the_work() -> None:
    engine: Any = AnsweringEngine(reason="error")
    with pytest.raises(EngineError, match="a prompt of 2 tokens ended with error, expected a completion"):
        serve_beside(engine, lambda: complete(engine, [[1, 2]], PARAMS, "r"))


def test_an_engine_that_cannot_load_is_asked_nothing() -> None:
    def load() -> None:
        raise DeviceError("no GPU")

    engine: Any = AnsweringEngine(load)
    with pytest.raises(DeviceError, match="no GPU"):
        serve_beside(engine, lambda: pytest.fail("it was asked"))
    assert engine.asked == []
