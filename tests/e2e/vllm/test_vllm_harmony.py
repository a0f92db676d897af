"""Messages in the format of gpt-oss, read by our routes over both engines: they say the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from harmony_model import TEMPLATE, write_harmony_thinker

PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "greet", "parameters": PERSON}}
OTHER: Any = {"type": "function", "function": {"name": "gone", "parameters": PERSON}}


@pytest.fixture(scope="module")
def clients(
    start_shared: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[openai.OpenAI]]:
    thinker = write_harmony_thinker(tmp_path_factory.mktemp("thinker"))
    with ExitStack() as stack:
        made = []
        for engine in ("vllm", "torch"):
            named = ("--engine", engine, "--served-model-name", "thinker")
            serving = start_shared("--model", thinker, "--kv-cache-mb", "64", *named)
            url = f"http://127.0.0.1:{serving.port}/v1"
            client = openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0)
            made.append(stack.enter_context(client))
        yield made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 2},
        {"max_tokens": 5},
        {"stop": "."},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"extra_body": {"structured_outputs": {"choice": ["yes", "yet"]}}},
        {"extra_body": {"structured_outputs": {"regex": "[ab]c"}}},
        {"extra_body": {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}},
        {"tools": [TOOL, OTHER]},
        {"tools": [TOOL, OTHER], "tool_choice": "required"},
        {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "gone"}}},
    ],
)
def test_both_engines_say_the_same(clients: list[openai.OpenAI], options: dict[str, Any]) -> None:
    asked: Any = {"model": "thinker", "messages": [{"role": "user", "content": "2+2"}], "temperature": 0, **options}
    found = []
    for client in clients:
        whole = client.chat.completions.create(**asked)
        choice = whole.choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
        reasoning, content = "", ""
        for chunk in client.chat.completions.create(**asked, stream=True):
            reasoning += getattr(chunk.choices[0].delta, "reasoning", None) or ""
            content += chunk.choices[0].delta.content or ""
        message: Any = choice.message
        assert (reasoning, content) == (message.reasoning or "", message.content or "")
        assert whole.usage is not None
        found.append((reasoning, content, calls, choice.finish_reason, whole.usage.completion_tokens))
    assert found[0] == found[1]
    assert found[0][0].startswith("I") or options == {"max_tokens": 2}


# vLLM renders chats of gpt-oss with the vocabulary of OpenAI's own library. Its other tokens are never decoded here.
VOCABULARY = 201_088
SPECIAL = {
    199_998: "<|startoftext|>", 199_999: "<|endoftext|>", 200_002: "<|return|>", 200_003: "<|constrain|>",
    200_005: "<|channel|>", 200_006: "<|start|>", 200_007: "<|end|>", 200_008: "<|message|>", 200_012: "<|call|>",
}  # fmt: skip


def write_gpt_oss(folder: Path) -> Path:
    """Write a small gpt-oss with random weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    config = GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=32,
        max_position_embeddings=1024, eos_token_id=200_002, pad_token_id=199_999,
        rope_parameters=rope | {"truncate": False, "original_max_position_embeddings": 32},
    )  # fmt: skip
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [200_002, 199_999, 200_012]}))
    known = dict(enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))) | SPECIAL
    vocabulary = {known.get(number, f"token{number}"): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_gpt_oss_is_answered_by_our_routes_and_by_those_of_vllm(start: Callable[..., Any], tmp_path: Path) -> None:
    """Ours come first: a form with tags does not need vLLM's server, which is mounted later."""
    serving = start(
        "--model", write_gpt_oss(tmp_path), "--engine", "vllm", "--kv-cache-mb", "64", "--max-model-len", "512"
    )
    url = f"http://127.0.0.1:{serving.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0) as client:
        asked: Any = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": "2+2"}]}
        form = {"structured_outputs": {"choice": ["yes"]}}
        for _ in range(2):
            answer = client.chat.completions.create(**asked, extra_body=form, max_tokens=400).choices[0]
            assert (answer.message.content, answer.finish_reason) in (("yes", "stop"), (None, "length"), ("", "length"))
            response = client.responses.create(model=asked["model"], input="2+2", max_output_tokens=5)
            assert (response.status, response.usage and response.usage.output_tokens) == ("incomplete", 5)
