"""An engine that answers prompts with their own letters, for tests of the engine's socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from medusa_runtime.engine.base import Delta, EngineInfo, GenerateRequest
from medusa_runtime.errors import EngineError, OverloadedError, RequestError


def words_only(text: str) -> list[int]:
    """Token ids of a tokenizer that knows one word; its library raises bare exceptions for others."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    ids: list[int] = Tokenizer(WordLevel({"known": 0})).encode(text).ids
    return ids


class SpellingEngine:
    """An engine that answers a prompt with its own letters; 'stall' gets one delta and then nothing more."""

    info = EngineInfo("spelling", "Speller", 256, 64, (0,), 64)

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def add(self, request: GenerateRequest, sink: Callable[[Delta], None]) -> None:
        assert isinstance(request.prompt, str)
        if request.prompt == "refuse":
            raise RequestError("prompt: expected anything but 'refuse'")
        if request.prompt == "unknown":
            words_only(request.prompt)
        if request.prompt == "busy":
            raise OverloadedError("256 requests are waiting", retry_after_s=7.5)
        if request.prompt.startswith("slow"):  # to tokenize
            while request.id not in self.cancelled:
                time.sleep(0.01)
            return  # and is known from now on: a cancel must come again
        if request.prompt == "stall":
            sink(Delta(request.id, "s"))
            return
        for letter in request.prompt:
            sink(Delta(request.id, letter, (ord(letter) % 256,)))
        sink(Delta(request.id, "", finish_reason="stop", prompt_tokens=1, completion_tokens=len(request.prompt)))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        if text == "unknown":
            words_only(text)
        if text == "large":
            return [10**15] * (4 << 20)
        while text.startswith("slow") and not self.cancelled:
            time.sleep(0.01)
        return list(text.encode())

    def embed(self, inputs: list[str], *, cancelled: threading.Event, **_: Any) -> list[Any]:
        while not cancelled.wait(0.01):
            pass
        self.cancelled += inputs
        raise EngineError("it was cancelled")

    def detokenize(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()

    def stats(self) -> dict[str, Any]:
        return {"cancelled": self.cancelled}
