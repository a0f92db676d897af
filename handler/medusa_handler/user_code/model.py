"""``context.model``: the engine, for user code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from medusa_runtime.engine.base import EmbedOptions, EngineInfo, GenerateRequest, SamplingParams

from ..caller import caller_salt, current_caller
from ..disconnection import current_disconnect_check
from ..model.embeddings import embeddings, floats
from ..model.generation import Generation
from ..model.structured_outputs import parse_structured_outputs

if TYPE_CHECKING:
    from ..model.harmony import HarmonyReasoning
    from ..model.served_model import ServedModel

Prompt = str | Sequence[int]

_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


class Model:
    """The model, for a function. Sampling parameters are vLLM's, e.g. ``max_tokens=64, temperature=0``.

    It may be used before the weights are there; a call then waits for them.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    @property
    def name(self) -> str:
        return self._served.name

    @property
    def info(self) -> EngineInfo:
        """The engine and the model that it runs. Waits until the engine is ready, at most ``hold_s``."""
        assert self._served.engine is not None
        return self._served.engine.wait_ready(self._served.settings.hold_s)

    def generate(self, prompt: Prompt, **sampling: Any) -> str:
        """Return the whole completion. Raises RequestError, OverloadedError, EngineError."""
        return "".join(self.stream(prompt, **sampling))

    def stream(self, prompt: Prompt, **sampling: Any) -> Iterator[str]:
        """Yield the completion's text as it comes."""
        text = prompt if isinstance(prompt, str) else tuple(prompt)
        return self._stream(text, _params(sampling), add_special_tokens=True)

    def chat(self, messages: list[dict[str, Any]], **sampling: Any) -> str:
        """Return the whole answer to ``messages``, rendered with the model's chat template."""
        return "".join(self.stream_chat(messages, **sampling))

    def stream_chat(self, messages: list[dict[str, Any]], **sampling: Any) -> Iterator[str]:
        """Yield the answer's text as it comes."""
        from ..model.harmony import harmony_reasoning  # a millisecond, and only a chat needs it

        params = _params({"max_tokens": None, **sampling})
        is_disconnected = _is_disconnected()
        template = self._served.chat_template(is_disconnected)
        prompt = template.render(messages, {"add_generation_prompt": True}, is_disconnected)
        harmony = harmony_reasoning(self._served.settings.reasoning_parser, template.source, prompt)
        if harmony is None:
            return self._stream(prompt, params, add_special_tokens=False)
        return self._stream_content(prompt, params, harmony)

    def embed(self, texts: Sequence[str | Sequence[int]], dimensions: int | None = None) -> list[list[float]]:
        """Return an encoder's vector for each text; texts beyond its length are cut.

        Raises RequestError, EngineError.
        """
        given = [text if isinstance(text, str) else tuple(text) for text in texts]
        found = embeddings(self._served, given, _is_disconnected(), EmbedOptions(dimensions, truncate=-1))
        return [floats(vector.data) for vector in found]

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert self._served.engine is not None
        return self._served.engine.tokenize(text, add_special_tokens)

    def detokenize(self, token_ids: list[int]) -> str:
        assert self._served.engine is not None
        return self._served.engine.detokenize(token_ids)

    def _stream(
        self, prompt: str | tuple[int, ...], params: SamplingParams, *, add_special_tokens: bool
    ) -> Iterator[str]:
        salt = caller_salt(current_caller.get())
        name = f"fn-{os.urandom(16).hex()}"
        request = GenerateRequest(name, prompt, params, add_special_tokens, cache_salt=salt)
        with Generation(self._served, [request], _is_disconnected()) as generation:
            for item in generation.events():
                if item is not None and item.value.text:
                    yield item.value.text

    def _stream_content(self, prompt: str, params: SamplingParams, harmony: HarmonyReasoning) -> Iterator[str]:
        """Yield the answer without its reasoning, in a format that cannot be read without its special tokens."""
        from ..model.harmony import content_of

        form = params.structured_outputs and harmony.before(params.structured_outputs)
        params = dataclasses.replace(params, structured_outputs=form, skip_special_tokens=False)
        return content_of(self._stream(prompt, params, add_special_tokens=False), harmony)


def _is_disconnected() -> Callable[[], bool]:
    return current_disconnect_check.get(lambda: False)


def _params(sampling: dict[str, Any]) -> SamplingParams:
    unknown = sorted(set(sampling) - _FIELDS)
    if unknown:
        raise TypeError(
            f"unknown sampling parameters {', '.join(unknown)}; expected some of {', '.join(sorted(_FIELDS))}"
        )
    if sampling.get("structured_outputs") is not None:
        sampling = {**sampling, "structured_outputs": parse_structured_outputs(sampling["structured_outputs"])}
    stop = sampling.get("stop") or ()
    return SamplingParams(**{**sampling, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})
