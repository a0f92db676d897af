"""A tokenizer of the tokenizers package as the metadata of a GGUF file, which llama.cpp's converter makes of it."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def gguf_metadata(parsed: Tokenizer, model: str, size: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the metadata of a BPE, filled up to ``size`` tokens. ``more`` has further keys of ``tokenizer.ggml``."""
    saved = json.loads(parsed.to_str())
    added = {token["id"]: token for token in saved["added_tokens"]}
    tokens = {number: token for token, number in parsed.get_vocab().items()}
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [],
        "tokenizer.ggml.token_type": [],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in saved["model"]["merges"]],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    for number in range(size or max(tokens) + 1):
        token = tokens.get(number)
        kind = UNUSED if token is None else NORMAL
        if number in added:
            kind = CONTROL if added[number]["special"] else USER_DEFINED
        elif token is not None and len(token) == 6 and token.startswith("<0x"):
            kind = BYTE
        metadata["tokenizer.ggml.tokens"].append(f"[PAD{number}]" if token is None else token)
        metadata["tokenizer.ggml.token_type"].append(UNKNOWN if token == "<unk>" else kind)
    return metadata
