"""Pictures in messages, and reasoning told from the answer: a tiny random model through vLLM's own routes."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

PATIENCE_S = 300.0
PICTURE_TOKENS = 4
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, example: Path) -> Path:
    """A BLIP-2 of random weights with the example's tokenizer: one of the models that need no torchvision."""
    import torch
    from transformers import AutoTokenizer, Blip2Config, Blip2ForConditionalGeneration, Blip2Processor, LlamaConfig
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    folder = tmp_path_factory.mktemp("seeing")
    tokenizer = AutoTokenizer.from_pretrained(example)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.add_tokens(["<think>", "</think>"])
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaConfig(
        **small, architectures=["LlamaForCausalLM"], vocab_size=len(tokenizer), head_dim=32, bos_token_id=0,
        max_position_embeddings=512, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    config = Blip2Config(
        text_config=text.to_dict(),
        vision_config={**small, "image_size": 28, "patch_size": 14},
        qformer_config={**small, "encoder_hidden_size": 64, "vocab_size": 8},
        num_query_tokens=PICTURE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)  # so that what it sees makes a difference
    model.save_pretrained(folder)
    pictures = BlipImageProcessorPil(size={"height": 28, "width": 28})
    Blip2Processor(pictures, tokenizer, num_query_tokens=PICTURE_TOKENS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(start_shared: Callable[..., Any], seeing: Path) -> Iterator[openai.OpenAI]:
    flags = ("--", "--no-language-model-only", "--reasoning-parser", "deepseek_r1", "--served-model-name", "seeing")
    flags += ("--allowed-media-domains", "localhost")
    serving = start_shared("--model", seeing, "--engine", "vllm", "--kv-cache-mb", "64", *flags)
    url = f"http://127.0.0.1:{serving.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0) as made:
        yield made
    assert serving.stop() == 0


def png(color: str) -> bytes:
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(data, "PNG")
    return data.getvalue()


def described(client: openai.OpenAI, color: str | None, url: str | None = None) -> Any:
    """The answer to a message with a picture of one color, or the one at ``url``, or without a picture."""
    content: list[Any] = [{"type": "text", "text": "What is it?"}]
    if color is not None:
        url = f"data:image/png;base64,{base64.b64encode(png(color)).decode()}"
    if url is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return client.chat.completions.create(
        model="seeing", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0, logprobs=True
    )


def test_a_picture_is_part_of_the_prompt(client: openai.OpenAI) -> None:
    blind, red, blue, again = (described(client, color) for color in (None, "red", "blue", "red"))
    assert red.usage.prompt_tokens == blue.usage.prompt_tokens == blind.usage.prompt_tokens + PICTURE_TOKENS
    seen = [[token.logprob for token in answer.choices[0].logprobs.content] for answer in (red, blue, again)]
    assert seen[0] == pytest.approx(seen[2], abs=1e-3)
    assert seen[0] != pytest.approx(seen[1], abs=1e-3)


def test_a_host_that_the_operator_names_cannot_lead_to_others(client: openai.OpenAI) -> None:
    asked: list[str] = []

    class Host(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            moved = self.path == "/moved"
            self.send_response(302 if moved else 200)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/inside")  # type: ignore[attr-defined]
            self.send_header("Content-Length", str(0 if moved else len(png("red"))))
            self.end_headers()
            self.wfile.write(b"" if moved else png("red"))

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        named, inside = (f"http://{name}:{host.server_port}" for name in ("localhost", "127.0.0.1"))
        there = described(client, None, f"{named}/red.png")
        assert there.choices[0].message == described(client, "red").choices[0].message
        for url in (f"{inside}/inside", f"{named}/moved", f"{named}@127.0.0.1:{host.server_port}/inside"):
            with pytest.raises(openai.APIStatusError):
                described(client, None, url)
        host.shutdown()
    assert asked == ["/red.png", "/moved"]


def test_reasoning_is_told_from_the_answer(client: openai.OpenAI, seeing: Path) -> None:
    from tokenizers import Tokenizer

    end = Tokenizer.from_file(str(seeing / "tokenizer.json")).token_to_id("</think>")
    asked: dict[str, Any] = {
        "model": "seeing", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4, "temperature": 0,
    }  # fmt: skip
    thinking = client.chat.completions.create(**asked, logit_bias={str(end): -100}).choices[0].message
    assert thinking.content is None
    assert thinking.model_extra["reasoning"]
    answered = client.chat.completions.create(**asked, logit_bias={str(end): 100}).choices[0].message
    assert not answered.model_extra["reasoning"]
    sampled = asked | {"max_tokens": 60, "temperature": 1.0, "logit_bias": {str(end): 6}}
    for seed in range(20):
        whole = client.chat.completions.create(**sampled, seed=seed).choices[0].message
        if whole.content and whole.model_extra["reasoning"]:
            break
    assert whole.content
    assert "</think>" not in whole.model_extra["reasoning"]
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**sampled, seed=seed, stream=True)]
    assert "".join(delta.model_extra.get("reasoning") or "" for delta in deltas) == whole.model_extra["reasoning"]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
