"""The fields of vLLM's requests: each is honoured, harmless or refused with a reason here."""

from __future__ import annotations

import importlib

import pytest
from medusa_handler.openai.body.fields import (
    CHAT,
    CLASSIFY,
    COMPLETION,
    DETOKENIZE,
    EMBEDDINGS,
    POOLING,
    REFUSED,
    REFUSED_FOR_RESPONSES,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    WITHOUT_EFFECT,
)

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("module", "name", "known"),
    [
        ("openai.chat_completion", "ChatCompletionRequest", CHAT | {"echo"}),
        ("openai.completion", "CompletionRequest", COMPLETION),
        ("openai.responses", "ResponsesRequest", RESPONSES | set(REFUSED_FOR_RESPONSES)),
        ("pooling.embed", "EmbeddingCompletionRequest", EMBEDDINGS),
        ("pooling.pooling", "PoolingCompletionRequest", POOLING),
        ("pooling.classify", "ClassificationCompletionRequest", CLASSIFY),
        ("pooling.scoring", "ScoreTextRequest", SCORE),
        ("pooling.scoring", "RerankRequest", RERANK),
        ("serve.tokenize", "TokenizeCompletionRequest", TOKENIZE),
        ("serve.tokenize", "TokenizeChatRequest", TOKENIZE),
        ("serve.tokenize", "DetokenizeRequest", DETOKENIZE),
    ],
)
def test_no_field_of_vllm_is_unknown(module: str, name: str, known: frozenset[str]) -> None:
    protocol = pytest.importorskip(f"vllm.entrypoints.{module}.protocol", exc_type=ImportError)
    fields = set(getattr(importlib.import_module(protocol.__name__), name).model_fields)
    assert not fields - known - WITHOUT_EFFECT - set(REFUSED)
