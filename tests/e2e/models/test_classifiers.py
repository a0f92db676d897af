"""`medusa serve` of encoders and classifiers that run by transformers' code: the same numbers as transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from encoder_checkpoint import WORDS, write_tokenizer
from fetching import fetch_into
from medusa_runtime.engine.encoder.text_encoder import Encoder
from medusa_runtime.errors import MismatchError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

pytestmark = pytest.mark.forked

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["a cat sat", "the mat was a cat and the cat sat on the mat"]
SHAPE = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = SHAPE | {"intermediate_size": 48, "max_position_embeddings": 40}
DISTILLED = {"vocab_size": len(WORDS), "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert": ("DistilBertModel", DISTILLED | {"max_position_embeddings": 40}),
    "distilbert-masked": ("DistilBertForMaskedLM", DISTILLED | {"max_position_embeddings": 40}),
    "electra": ("ElectraModel", LARGE | {"embedding_size": 16}),
    "mpnet": ("MPNetModel", LARGE),
    "albert": ("AlbertModel", LARGE | {"embedding_size": 16}),
    "modernbert": ("ModernBertModel", LARGE | {"pad_token_id": 0, "global_attn_every_n_layers": 2}),
    "distilbert-labels": ("DistilBertForSequenceClassification", DISTILLED | {"max_position_embeddings": 40,
                                                                              "num_labels": 3}),
    "roberta-labels": ("RobertaForSequenceClassification", LARGE | {"num_labels": 2, "pad_token_id": 1}),
    "bert-score": ("BertForSequenceClassification", LARGE | {"num_labels": 1}),
    # Decoders, whose last token counts; they find it by the padding, of which one has none.
    "opt-labels": ("OPTForSequenceClassification", SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_labels": 3,
                                                            "max_position_embeddings": 40, "pad_token_id": 1}),
    "phi3-score": ("Phi3ForSequenceClassification", LARGE | {"num_labels": 1, "pad_token_id": None}),
    "falcon-labels": ("FalconForSequenceClassification", SHAPE | {"num_labels": 3, "pad_token_id": 1}),
    "gemma2-labels": ("Gemma2ForSequenceClassification", LARGE | {"num_key_value_heads": 2, "head_dim": 8,
                                                                  "num_labels": 3, "pad_token_id": 1}),
    "gemma3-score": ("Gemma3TextForSequenceClassification", LARGE | {"num_key_value_heads": 2, "head_dim": 8,
                                                                     "num_labels": 1, "pad_token_id": 1}),
    "qwen3-score": ("Qwen3ForSequenceClassification", LARGE | {"num_key_value_heads": 2, "head_dim": 8,
                                                               "num_labels": 1, "pad_token_id": 0}),
    "mistral-labels": ("MistralForSequenceClassification", LARGE | {"num_key_value_heads": 2, "num_labels": 3,
                                                                    "pad_token_id": WORDS.index("[SEP]")}),
    "mixture-labels": ("Qwen3MoeForSequenceClassification", LARGE | {"num_key_value_heads": 2, "head_dim": 8,
                       "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_labels": 3,
                       "problem_type": "multi_label_classification", "pad_token_id": 0}),
}  # fmt: skip


def write(case: str, folder: Path) -> Any:
    name, values = CASES[case]
    kind = getattr(transformers, name)
    torch.manual_seed(1)
    model = kind(kind.config_class(**values)).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def ids_of(folder: Path, *texts: str) -> Any:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(*texts)


def expected(model: Any, folder: Path, *texts: str) -> torch.Tensor:
    """One text, or a pair, without padding."""
    found = ids_of(folder, *texts)
    segments = {"token_type_ids": torch.tensor([found.type_ids])} if len(texts) == 2 else {}
    with torch.no_grad():
        if hasattr(model, "classifier") or hasattr(model, "score"):
            logits = model(torch.tensor([found.ids]), **segments).logits[0]
            several = model.config.problem_type == "multi_label_classification"
            return logits.sigmoid() if len(logits) == 1 or several else logits.softmax(-1)
        hidden = model.base_model(torch.tensor([found.ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden.mean(0), dim=-1)


QUICK = ("distilbert", "modernbert", "roberta-labels", "opt-labels", "qwen3-score", "mistral-labels")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_vectors_and_labels_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = write(case, tmp_path)
    region = Region.create()
    fetch_into(region, str(tmp_path))
    encoder = Encoder(region, Timeline.create("engine"))
    try:
        with torch.inference_mode():
            found = encoder.encode([encoder.tokenize(text) for text in TEXTS])  # the shorter one is padded
        wanted = torch.stack([expected(model, tmp_path, text) for text in TEXTS])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    finally:
        encoder.close()
        region.close()


def test_a_classifier_answers_its_routes(tmp_path: Path, start: Callable[..., Any]) -> None:
    model = write("bert-score", tmp_path)
    instance = start("--model", str(tmp_path))

    def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = instance.exchange("POST", path, json.dumps(body), {"content-type": "application/json"})
        return answer.status, json.loads(answer.body)

    status, ranked = post("/rerank", {"query": "the cat", "documents": TEXTS, "top_n": 2})
    assert status == 200, ranked
    scores = {one["index"]: one["relevance_score"] for one in ranked["results"]}
    wanted = [float(expected(model, tmp_path, "the cat", text)) for text in TEXTS]
    assert [scores[0], scores[1]] == pytest.approx(wanted, rel=1e-4)
    assert [one["relevance_score"] for one in ranked["results"]] == sorted(scores.values(), reverse=True)
    status, classified = post("/classify", {"input": TEXTS})
    assert (status, [one["label"] for one in classified["data"]]) == (200, ["LABEL_0", "LABEL_0"])
    assert classified["data"][1]["probs"] == pytest.approx(expected(model, tmp_path, TEXTS[1]).tolist(), rel=1e-4)
    assert post("/", {"input": TEXTS})[1]["data"] == classified["data"]
    assert post("/", {"query": "the cat", "documents": TEXTS, "top_n": 2})[1]["results"] == ranked["results"]
    assert post("/v1/embeddings", {"input": "a"})[0] == 400
    assert post("/rerank", {"query": "a"})[0] == 400
    status, scored = post("/v1/score", {"text_1": "the cat", "text_2": TEXTS})
    assert (status, [one["score"] for one in scored["data"]]) == (200, pytest.approx(wanted, rel=1e-4))
    assert scored["usage"] == ranked["usage"]
    assert post("/score", {"queries": ["the cat", "the cat"], "documents": TEXTS})[1]["data"] == scored["data"]
    assert post("/", {"text_1": "the cat", "text_2": TEXTS})[1]["data"] == scored["data"]
    status, bare = post("/rerank", {"query": "the cat", "documents": TEXTS, "use_activation": False})
    wanted_logits = torch.tensor(wanted).logit().tolist()
    found = {one["index"]: one["relevance_score"] for one in bare["results"]}
    assert (status, [found[0], found[1]]) == (200, pytest.approx(wanted_logits, rel=1e-3))
    assert post("/pooling", {"input": TEXTS})[1]["data"][1]["data"] == classified["data"][1]["probs"]
    # The longer text loses the next token, and each text may have a limit of its own.
    for options, pair in (
        ({"truncate_prompt_tokens": 8}, ("the cat", "the mat was")),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, ("the cat", "on the mat")),
        ({"max_tokens_per_query": 1, "max_tokens_per_doc": 4}, ("the", "the mat was a")),
    ):
        status, scored = post("/score", {"text_1": "the cat", "text_2": TEXTS[1], **options})
        assert (status, scored["data"][0]["score"]) == (
            200,
            pytest.approx(float(expected(model, tmp_path, *pair)), rel=1e-4),
        )
    # A query of 300 kB for 2048 documents once took a minute of the engine's time, for a few tokens of each.
    long = {"query": "the " * 75_000, "documents": ["a"] * 2048, "truncate_prompt_tokens": -1}
    status, refused = post("/rerank", long)
    assert (status, "at most 16777216 characters, counting a query for each" in str(refused)) == (400, True), refused
    assert post("/rerank", long | {"documents": ["a"]})[0] == 200
    status, refused = post("/score", {"text_1": long["query"], "text_2": long["documents"]})
    assert (status, refused["error"]["param"]) == (400, "text_2")
    described = json.loads(instance.exchange("GET", "/openapi.json").body)["paths"]
    assert {"/classify", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"} <= set(described)
    assert not {"/v1/completions", "/v1/embeddings"} & set(described)


def test_a_decoder_without_a_classifying_head_is_refused(tmp_path: Path) -> None:
    write("qwen3-score", tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    for score, found in ((None, "none"), (torch.zeros(1, 8), r"one of shape \[1, 8\]")):
        kept = {name: value for name, value in tensors.items() if name != "score.weight"}
        safetensors.torch.save_file(kept if score is None else {**kept, "score.weight": score}, weights)
        region = Region.create()
        fetch_into(region, str(tmp_path))
        with pytest.raises(
            MismatchError, match=rf"score.weight: expected a tensor of shape \[labels, 32\], found {found}"
        ):
            Encoder(region, Timeline.create("engine"))
        region.close()
