"""Texts that wait in the encoders' engine: they end with their caller, and with the engine."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import EmbedOptions
from medusa_runtime.engine.encoder import engine as encoder_engine
from medusa_runtime.engine.encoder.engine import EncoderEngine
from medusa_runtime.engine.encoder.text_encoder import Tokens
from medusa_runtime.errors import EngineError
from medusa_runtime.timeline import Timeline
from waiting import until


class FakeEncoder:
    """Encodes a text once ``pool`` may go on."""

    is_classifier, max_tokens, size = False, 8, 2

    class config:
        vocab_size = 100

    def __init__(self, *_: object) -> None: ...

    def tokenize(self, text: str, options: EmbedOptions) -> Tokens:
        return Tokens([1, 2])

    def activated(self, vector: Any, options: EmbedOptions) -> Any:
        return vector

    def pool(self, texts: list[Tokens]) -> Any:
        raise SystemExit  # as a signal's handler may, in the middle of a forward

    def close(self) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[EncoderEngine]:
    monkeypatch.setattr(encoder_engine, "Encoder", FakeEncoder)
    made = EncoderEngine(None, Settings(threads=1), Timeline.create("test"))  # type: ignore[arg-type]
    yield made
    made.close()


def embedding(engine: EncoderEngine, cancelled: threading.Event | None = None) -> tuple[threading.Thread, list[str]]:
    """Embed in a thread, and return it, and the list that its error is put into."""
    errors: list[str] = []

    def embed() -> None:
        with pytest.raises(EngineError) as found:
            engine.embed(["a text"], cancelled=cancelled)
        errors.append(str(found.value))

    thread = threading.Thread(target=embed, daemon=True)
    thread.start()
    until(lambda: engine.stats()["waiting"] == 1)
    return thread, errors


def test_a_text_whose_caller_has_left_is_not_encoded(engine: EncoderEngine) -> None:
    cancelled = threading.Event()
    thread, errors = embedding(engine, cancelled)
    cancelled.set()
    thread.join(10)
    assert not thread.is_alive()
    assert "cancelled" in errors[0]
    assert engine.stats()["waiting"] == 0


def test_a_caller_of_many_texts_leaves_as_fast_as_one_of_few(engine: EncoderEngine) -> None:
    """With 120,000 texts waiting, each caller of 2048 that left once kept everybody from the engine for 1.5 s."""
    others = [encoder_engine._Text(Tokens([1])) for _ in range(40_000)]
    left = threading.Event()
    left.set()

    def cpu_s(count: int) -> float:
        texts = [encoder_engine._Text(Tokens([2])) for _ in range(count)]
        engine._waiting = [*others, *texts]
        began = time.process_time()
        with pytest.raises(EngineError, match="cancelled"):
            engine._wait(texts[0], texts, left)
        taken_s = time.process_time() - began
        assert engine._waiting == others
        return taken_s

    assert min(cpu_s(2048) / cpu_s(1) for _ in range(3)) < 20
    engine._waiting = []


def test_a_text_in_the_step_that_ends_the_engine_gets_an_error(engine: EncoderEngine) -> None:
    thread, errors = embedding(engine)
    with pytest.raises(SystemExit):
        engine.run(threading.Event())
    thread.join(10)
    assert not thread.is_alive(), "it waits for ever"
    assert errors


def test_a_vector_that_is_not_finite_is_an_error(engine: EncoderEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN made an answer that is no JSON, and put documents in any order."""
    monkeypatch.setattr(FakeEncoder, "pool", lambda self, texts: torch.tensor([[1.0, math.nan]] * len(texts)))
    stop = threading.Event()
    running = threading.Thread(target=engine.run, args=(stop,))
    running.start()
    try:
        with pytest.raises(EngineError, match="infinite or NaN"):
            engine.embed(["a text"])
    finally:
        stop.set()
        running.join(60)
