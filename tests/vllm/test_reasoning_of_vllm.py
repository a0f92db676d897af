"""Our parsers of reasoning beside vLLM's of the same names: the same text has the same reasoning and content."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fixtures import byte_level_tokenizer
from medusa_handler.openai.reasoning import TaggedReasoning, reasoning_of

pytestmark = pytest.mark.vllm

TEXTS = [
    "<think>\nI add.\n</think>\n\nFour.",
    "I add.</think>Four.",
    "<think>I add, and",
    "I add, and",
    "<think></think>Four.",
    "<think>I add.</think>\n",
    'Which?</think>\n<tool_call>{"name": "time"}</tool_call>',
    'Which?\n<tool_call>{"name": "time"}</tool_call>',
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    written = byte_level_tokenizer()
    written.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=written)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_text_has_the_reasoning_that_vllm_finds(tokenizer: Any, name: str, text: str) -> None:
    managers = pytest.importorskip("vllm.reasoning")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "2+2"}])
    theirs = managers.ReasoningParserManager.get_reasoning_parser(name)(tokenizer).extract_reasoning(text, request)
    # Without an opening tag, vLLM takes the text for reasoning whatever the prompt says, and we only if it says so.
    found = reasoning_of(name, "", "<think>\n")
    assert found == TaggedReasoning("inside", name == "qwen3")
    assert found.parser().push(text, last=True) == [tuple(part or "" for part in theirs)]


def test_vllm_keeps_the_opening_tag_of_a_delta_of_several_tokens(tokenizer: Any) -> None:
    """A fault of vLLM 0.32, which test_vllm_reasoning.py allows for; once this fails, it need not any more."""
    managers = pytest.importorskip("vllm.reasoning")

    def stream(*deltas: str) -> str:
        parser = managers.ReasoningParserManager.get_reasoning_parser("deepseek_r1")(tokenizer)
        text, ids, reasoning = "", [], ""
        for delta in deltas:
            new = tokenizer.encode(delta, add_special_tokens=False)
            said = parser.extract_reasoning_streaming(text, text + delta, delta, ids, ids + new, new)
            text, ids = text + delta, ids + new
            reasoning += (said and said.reasoning) or ""
        return reasoning

    assert stream("<think>", "I", " add") == "I add"
    assert stream("<think>I", " add") == "<think>I add"
    parser = reasoning_of("deepseek_r1", "", "").parser()
    assert parser.push("<think>I", last=False) + parser.push(" add", last=True) == [("I", ""), (" add", "")]
