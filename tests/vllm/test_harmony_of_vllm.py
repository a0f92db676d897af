"""Our parsers of gpt-oss beside OpenAI's library, and vLLM's sorting of what that finds, on random conversations."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from medusa_handler.model.harmony import HarmonyParser
from medusa_handler.openai.tools.formats import HarmonyCallParser

pytestmark = pytest.mark.vllm

ENDS = ("<|end|>", "<|call|>", "<|return|>", "")
CALLED = ("functions.f", "functions.a.b-c", "functions.python", "f", "python", "browser.open")
TYPES = ("", " json", " <|constrain|>json", " code")


def message(chance: random.Random) -> str:
    """A message of the model's without its end: the header with or without a recipient, wherever that may be."""
    channel = chance.choice(["analysis", "commentary", "final"])
    text = "".join(chance.choices("aé€😀 <|>\n{}\"':;\\", k=chance.randint(1, 20)))
    if chance.random() < 0.5:
        return f"<|channel|>{channel}<|message|>{text}."
    called = f" to={chance.choice(CALLED)}"
    before, behind = (called, "") if chance.random() < 0.5 else ("", called)
    arguments = json.dumps({"a": text}, ensure_ascii=False)
    return f"{before}<|channel|>{channel}{behind}{chance.choice(TYPES)}<|message|>{arguments}"


def ours(pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parser, calls_parser = HarmonyParser(""), HarmonyCallParser(frozenset("f"))
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    found = [part for piece in pieces for part in parser.push(piece, last=False)] + parser.push("", last=True)
    for parsed in [*(calls_parser.push(rest) for _, rest in found), calls_parser.finish()]:
        content += parsed.content
        for call in parsed.calls:
            if call.name is not None:
                calls.append((call.name, ""))
            calls[call.number] = (calls[call.number][0], calls[call.number][1] + call.arguments)
    return reasoning + "".join(thought for thought, _ in found), content, calls


def theirs(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    harmony: Any = pytest.importorskip("openai_harmony")
    from vllm.entrypoints.openai.parser.harmony_utils import extract_function_from_recipient, get_encoding
    from vllm.parser.harmony import HarmonyParser as OfVllm
    from vllm.parser.harmony import _SegmentType

    encoding = get_encoding()
    parser = harmony.StreamableParser(encoding, role=harmony.Role.ASSISTANT)
    for token in encoding.encode(text, allowed_special="all"):
        parser.process(token)
    parser.process_eos()
    reasoning, content, calls = [], [], []
    for each in parser.messages:
        recipient = OfVllm._normalize_recipient(each.recipient)
        kind = _SegmentType.from_channel_and_recipient(each.channel, recipient)
        if kind == _SegmentType.REASONING:
            reasoning.append(each.content[0].text)
        elif kind == _SegmentType.CONTENT:
            content.append(each.content[0].text)
        elif kind == _SegmentType.TOOL:
            calls.append((extract_function_from_recipient(recipient), each.content[0].text))
    return "\n".join(reasoning), "\n".join(content), calls


def test_a_conversation_has_the_parts_that_vllm_finds() -> None:
    for seed in range(2000):
        chance = random.Random(seed)
        messages = [message(chance) for _ in range(chance.randint(1, 5))]
        text = "<|end|><|start|>assistant".join(messages) + chance.choice(ENDS)
        step = chance.randint(1, 12)
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        assert ours(pieces) == theirs(text), text
