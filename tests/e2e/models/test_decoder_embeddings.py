"""Embeddings of decoders, such as Qwen3-Embedding: `medusa serve` against transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_checkpoint import WORDS, write_dense, write_pooling
from gguf_files import write_gguf

pytestmark = pytest.mark.forked

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

Start = Callable[..., Any]
TEXTS = ["a cat sat", "the mat was a cat and the cat sat on the mat", "sat"]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
END = WORDS.index("[SEP]")


def write_embedder(folder: Path, kind: str, pooling: str = "lasttoken", *, bare: bool = False, **options: Any) -> Path:
    """A tiny decoder with random weights, as sentence-transformers saves it; ``bare``: without its head."""
    sizes = SIZES | ({"head_dim": 16} if kind != "Qwen2" else {}) | options
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}{'Model' if bare else 'ForCausalLM'}")(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    write_pooling(folder, pooling, unit=True)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: id for id, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_eos_token": True, "eos_token": "[SEP]"}))
    return folder


def ids_of(text: str) -> list[int]:
    return [*map(WORDS.index, text.split()), END]


def reference(folder: Path, pooling: str) -> torch.Tensor:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = [model(torch.tensor([ids_of(text)])).last_hidden_state[0] for text in TEXTS]
    rows = [one[-1] if pooling == "lasttoken" else one.mean(0) for one in hidden]
    return torch.nn.functional.normalize(torch.stack(rows))


def vectors(serving: Any, **body: Any) -> torch.Tensor:
    status, answer, _ = serving.request("POST", "/v1/embeddings", {"input": TEXTS, **body})
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(text)) for text in TEXTS)
    return torch.tensor([row["embedding"] for row in answer["data"]])


@pytest.mark.parametrize(
    ("kind", "pooling", "options"),
    [
        ("Qwen3", "lasttoken", {"tie_word_embeddings": True}),
        ("Qwen2", "lasttoken", {"tie_word_embeddings": False}),  # a head that is not needed
        ("Mistral", "lasttoken", {"bare": True, "sliding_window": 256}),
        ("Llama", "mean", {"bare": True}),
    ],
)
def test_vectors_are_those_of_transformers(
    start: Start, tmp_path: Path, kind: str, pooling: str, options: dict[str, Any]
) -> None:
    folder = write_embedder(tmp_path / "m", kind, pooling, **options)
    serving = start("--model", folder)
    expected = reference(folder, pooling)
    torch.testing.assert_close(vectors(serving), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(vectors(serving, input=[ids_of(text) for text in TEXTS]), expected, rtol=0, atol=1e-5)
    shorter = torch.nn.functional.normalize(expected[:, :16])
    torch.testing.assert_close(vectors(serving, dimensions=16), shorter, rtol=0, atol=1e-5)
    most = serving.request("GET", "/v1/models")[1]["data"][0]["max_model_len"]
    assert most == options.get("sliding_window", 512)
    long = " ".join(["cat"] * most)  # with the token that ends it, it is one too many
    status, answer, _ = serving.request("POST", "/v1/embeddings", {"input": long})
    assert status == 400
    message = f"this model's maximum context length is {most} tokens, and the input has {most + 1}"
    assert message in answer["error"]["message"]
    assert serving.request("POST", "/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})[0] == 200
    status, answer, _ = serving.request("POST", "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
    assert status == 200, answer
    scores = torch.tensor([row["score"] for row in answer["data"]])
    torch.testing.assert_close(scores, expected[1:] @ expected[0], rtol=0, atol=1e-5)
    assert serving.request("POST", "/v1/completions", {"prompt": "a"})[0] == 400
    assert serving.stop() == 0


def test_a_gguf_file_that_says_how_it_pools(start: Start, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "m", "Qwen3", tie_word_embeddings=True)
    file = write_gguf(folder, tmp_path / "m.gguf", qwen3__pooling_type=3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    serving = start("--model", file)
    torch.testing.assert_close(vectors(serving), reference(folder, "lasttoken"), rtol=0, atol=1e-5)
    assert serving.stop() == 0
    refused = start("--model", write_gguf(folder, tmp_path / "m.gguf", qwen3__pooling_type=4))
    assert refused.process.wait(60) != 0
    assert "qwen3.pooling_type is 4, which is not supported; expected 1 (mean), 2 (cls), 3" in refused.output()


def test_a_text_is_no_longer_than_memory_allows(start: Start, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "m", "Qwen3", max_position_embeddings=1 << 26, tie_word_embeddings=True)
    serving = start("--model", folder)
    vectors(serving)
    most = serving.request("GET", "/v1/models")[1]["data"][0]["max_model_len"]
    assert 256 < most < 1 << 26
    assert f"texts of up to {most} tokens fit into memory, of {1 << 26} that the model reads" in serving.output()
    assert serving.stop() == 0


def test_decoders_whose_tokens_see_later_ones_make_embeddings_and_no_text(start: Start, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "m", "Qwen2", is_causal=False)
    causal = write_embedder(tmp_path / "causal", "Qwen2")
    expected = reference(folder, "lasttoken")
    assert (expected - reference(causal, "lasttoken")).abs().max() > 0.01
    serving = start("--model", folder)
    torch.testing.assert_close(vectors(serving), expected, rtol=0, atol=1e-5)
    assert serving.stop() == 0
    (folder / "modules.json").unlink()
    refused = start("--model", folder)
    assert refused.process.wait(60) != 0
    assert "tokens of this model see later ones (is_causal is false" in refused.output()


@pytest.mark.parametrize("as_torch", [False, True])
def test_embedding_gemma(start: Start, tmp_path: Path, as_torch: bool) -> None:
    """Windows in both directions, the mean of all tokens, and two layers behind it."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    folder = write_embedder(
        tmp_path / "m", "Gemma3Text", "mean", bare=True, use_bidirectional_attention=True, sliding_window=6,
        layer_types=layers,
    )  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Gemma3TextModel"]
    dense = write_dense(folder, 96, 48, activation="linear.Identity", as_torch=as_torch)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.sliding_window == 4
    with torch.inference_mode():
        pooled = torch.stack([model(torch.tensor([ids_of(text)])).last_hidden_state[0].mean(0) for text in TEXTS])
        expected = torch.nn.functional.normalize(dense(pooled))
    serving = start("--model", folder)
    torch.testing.assert_close(vectors(serving), expected, rtol=0, atol=1e-5)
    most = serving.request("GET", "/v1/models")[1]["data"][0]["max_model_len"]
    assert most == 512
    assert serving.stop() == 0
