"""The reasoning that a model writes before its answer, ``<think>…</think>``, and a parser that separates the two.

gpt-oss has a format of its own for all that it writes (``harmony``).

The chat template shows whether a model reasons. The prompt that it makes shows where an answer begins: DeepSeek-R1's
ends with ``<think>``, so that the answer begins inside the reasoning. Qwen3's with ``enable_thinking: false`` ends with
``</think>``, so that there is none. vLLM has parsers of the same names.
"""

from __future__ import annotations

import functools
import re
from typing import Literal, NamedTuple, Protocol

from medusa_runtime.engine.base import StructuredOutputs

from ..model.harmony import harmony_reasoning

_START, _END = "<think>", "</think>"
_CALL = "<tool_call>"
_OTHER_TAGS = re.compile(r"</([\w:]*)>|\[/THINK\]|<\|channel\|>", re.IGNORECASE)
_OF_REASONING = re.compile("think|thought|reason", re.IGNORECASE)
_MOST_SPACE = 64  # characters before the opening tag


class ReasoningParser(Protocol):
    """A parser that separates the reasoning in one text, which comes in pieces, from the rest.

    ``reasoning``: the next text is reasoning. ``inside``: it is that, or markup. ``ended``: it may be an answer's.
    ``separator`` is what the parser puts between two messages.
    """

    @property
    def reasoning(self) -> bool: ...

    @property
    def inside(self) -> bool: ...

    @property
    def ended(self) -> bool: ...

    @property
    def separator(self) -> str: ...

    def push(self, text: str, *, last: bool) -> list[tuple[str, str]]:
        """Return reasoning and other text, in order, that have become certain with a piece of the text."""


class Reasoning(Protocol):
    """How an answer with reasoning begins. ``is_marked``: special tokens show what is reasoning."""

    @property
    def is_marked(self) -> bool: ...

    def parser(self) -> ReasoningParser: ...

    def before(self, form: StructuredOutputs) -> StructuredOutputs:
        """Return a form that begins behind the reasoning."""


class TagParser:
    """Separates the reasoning at the beginning of a text, which comes in pieces, from the content behind it.

    ``place`` is where the text begins. Before the reasoning, an opening tag begins it; any other text is content.
    ``ends_at_call``: a call of a tool ends the reasoning without a closing tag.
    """

    separator = ""

    def __init__(self, place: Literal["before", "inside", "behind"], *, ends_at_call: bool) -> None:
        self.inside = place == "inside"
        self.ended = place == "behind"
        self._begun = False  # whether it is known that the text begins with an opening tag, or not
        self._ends = (_END, _CALL) if ends_at_call else (_END,)
        self._held = ""  # may be the beginning of a tag

    @property
    def reasoning(self) -> bool:
        return self.inside

    def push(self, text: str, *, last: bool) -> list[tuple[str, str]]:
        found = self._push(text, last)
        return [found] if any(found) else []

    def _push(self, text: str, last: bool) -> tuple[str, str]:
        if self.ended:
            return "", text
        self._held += text
        if not self._begun and not self._begin(last):
            return "", ""
        held, self._held = self._held, ""
        if self.ended:
            return "", held
        found = [at for end in self._ends if (at := held.find(end)) >= 0]
        if found:
            at = min(found)
            self.inside, self.ended = False, True
            return held[:at], held[at:].removeprefix(_END)
        if not last:
            kept = max(_overlap(held, end) for end in self._ends)
            held, self._held = held[: len(held) - kept], held[len(held) - kept :]
        return held, ""

    def _begin(self, last: bool) -> bool:
        """Take an opening tag from the text. Return False as long as the text may be the beginning of one."""
        found = self._held.lstrip()
        if found.startswith(_START):  # also where the prompt has one: some models repeat it
            self._held = found.removeprefix(_START)
            self.inside = True
        elif not last and _START.startswith(found) and len(self._held) < _MOST_SPACE:
            return False
        self._begun = True
        self.ended = not self.inside
        return True


class TaggedReasoning(NamedTuple):
    """Reasoning between tags: where it begins, and what ends it."""

    place: Literal["before", "inside", "behind"]
    ends_at_call: bool

    @property
    def is_marked(self) -> bool:
        return self.place != "behind"

    def parser(self) -> TagParser:
        return TagParser(self.place, ends_at_call=self.ends_at_call)

    def before(self, form: StructuredOutputs) -> StructuredOutputs:
        if self.place == "behind":
            return form
        return form._replace(opening=_START if self.place == "before" else "", closing=_END)


def reasoning_of(name: str, template: str, prompt: str, continued: str | None = None) -> Reasoning | None:
    """Return how the answer to a prompt begins, in the format of this name; None if models of it do not reason.

    For ``auto``, the format is the one that the chat template shows. None if it shows none, or others besides.
    ``continued`` is the beginning of the answer, if the prompt has one.
    """
    if (harmony := harmony_reasoning(name, template, prompt)) is not None:
        return harmony
    if name == "auto":
        if _END not in template or _has_other_tags(template):
            return None
        name = "qwen3" if _CALL in template else "deepseek_r1"
    if name == "none":
        return None
    return TaggedReasoning(_place(prompt.rstrip(), continued), name == "qwen3")


@functools.lru_cache(maxsize=1)
def _has_other_tags(template: str) -> bool:
    found = (match for match in _OTHER_TAGS.finditer(template) if match[0].lower() != _END)
    return any(match[1] is None or _OF_REASONING.search(match[1]) for match in found)


def _place(prompt: str, continued: str | None) -> Literal["before", "inside", "behind"]:
    if continued is not None:
        return "inside" if continued.rfind(_START) > continued.rfind(_END) else "behind"
    return "inside" if prompt.endswith(_START) else "behind" if prompt.endswith(_END) else "before"


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of a text are the beginning of a tag."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
