"""The tokenizer of a GGUF file, as the files that a checkpoint of transformers has for it.

Engines and chat templates read these, so a GGUF file needs nothing else behind it. Source: llama.cpp's
``llama-vocab.cpp``, for what the metadata means and what holds without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...imports.gc_paused import gc_paused
from .bpe import PRE, byte_level, characters, pre_tokenizer
from .metadata import Metadata
from .pretokenizers import CHARACTER_PRE_TOKENIZERS, LSTRIPPED_MASKS
from .vocabulary import Vocabulary

_MODEL = "tokenizer.ggml.model"
_TEMPLATE = "tokenizer.chat_template"
_KINDS = ("gpt2", "llama", "gemma4")
_MOST_TEMPLATES = 100
_SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # which old files leave out
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@gc_paused()  # the collector would look through the vocabulary again and again
def tokenizer_files(name: str, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json`` for a GGUF file's metadata.

    ``name`` is the file's, for messages. A file without a tokenizer has none of them. Raises ConfigError for a kind
    of tokenizer that is not supported, ModelError for one that is too large, and CorruptError.
    """
    values = Metadata(name, metadata)
    kind = values.text(_MODEL)
    if kind in (None, "none", "no_vocab"):
        return {}
    if kind not in _KINDS:
        raise ConfigError(
            f"{name}: {_MODEL} is {kind[:80]!r}, which is not supported (supported are {', '.join(_KINDS)}); "
            "put the model's tokenizer.json beside the file"
        )
    vocabulary = Vocabulary(values)
    if kind == "gpt2" and values.text(PRE) not in CHARACTER_PRE_TOKENIZERS:
        document, adds_bos = byte_level(vocabulary), pre_tokenizer(values).adds_bos
    else:
        if kind == "llama":
            vocabulary.find_special(_SENTENCEPIECE)
        spaces = values.flag("tokenizer.ggml.add_space_prefix")
        document = characters(vocabulary, adds_space=kind == "llama" if spaces is None else spaces)
        adds_bos = kind == "llama"
    bos = _added(vocabulary, "bos", adds_bos) if kind != "gemma4" else vocabulary.special.get("bos_token")
    eos = _added(vocabulary, "eos", False)
    document["post_processor"] = _post_processor(vocabulary, document["post_processor"], bos, eos)
    begin = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(_stripped(vocabulary)),
    }
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": bos is not None,
            "add_eos_token": eos is not None,
            **{special: vocabulary.tokens[at] for special, at in vocabulary.special.items()},
            **_templates(values),
        },
    }
    if vocabulary.ends:
        files["generation_config.json"] = {"eos_token_id": vocabulary.ends}
    return {"tokenizer.json": _tokenizer({**begin, **document}), **{name: _json(each) for name, each in files.items()}}


def _tokenizer(document: dict[str, Any]) -> bytes:
    """Return the text of tokenizer.json. The vocabulary and the merges may be text already."""
    model = document.pop("model")
    large = {name: model.pop(name) for name in ("vocab", "merges")}
    texts = {name: part if isinstance(part, bytes) else _json(part) for name, part in large.items()}
    return b"".join((
        _json(document)[:-1], b',"model":', _json(model)[:-1], b',"vocab":', texts["vocab"], b',"merges":',
        texts["merges"], b"}}",
    ))  # fmt: skip


def _added(vocabulary: Vocabulary, which: str, default: bool) -> int | None:
    """Return the id of the token that each text begins (``bos``) or ends with (``eos``), or None without one."""
    asked = vocabulary.metadata.flag(f"tokenizer.ggml.add_{which}_token")
    token = vocabulary.special.get(f"{which}_token")
    if asked and token is None:
        key = f"tokenizer.ggml.{which}_token_id"
        raise vocabulary.metadata.error(key, f"a token's id, since add_{which}_token is true", "none")
    return token if (default if asked is None else asked) else None


def _post_processor(
    vocabulary: Vocabulary, before: dict[str, Any] | None, bos: int | None, eos: int | None
) -> dict[str, Any] | None:
    if bos is None and eos is None:
        return before
    tokens = {vocabulary.tokens[at]: at for at in (bos, eos) if at is not None}

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        begin, end = (
            [] if at is None else [{"SpecialToken": {"id": vocabulary.tokens[at], "type_id": type_id}}]
            for at in (bos, eos)
        )
        return [*begin, {"Sequence": {"id": sequence, "type_id": type_id}}, *end]

    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [at], "tokens": [token]} for token, at in tokens.items()},
    }
    return template if before is None else {"type": "Sequence", "processors": [before, template]}


def _stripped(vocabulary: Vocabulary) -> dict[int, str]:
    """Return the ids of tokens that swallow the white space beside them, and on which side. The format leaves it out.

    Phi-3 swallows what is behind its special tokens, and embedders what is before the token that is to be guessed.
    """
    metadata = vocabulary.metadata
    if metadata.text(_MODEL) == "llama" and metadata.text("general.architecture") == "phi3":
        kept = {vocabulary.ids.get(token) for token in _PHI3_KEEPS_SPACE}
        return {at: "rstrip" for at in vocabulary.added if at not in kept}
    mask = vocabulary.special.get("mask_token")
    if mask is not None and metadata.text(PRE) in LSTRIPPED_MASKS:
        return {mask: "lstrip"}
    return {}


def _templates(values: Metadata) -> dict[str, Any]:
    default, names = values.text(_TEMPLATE), values.strings("tokenizer.chat_templates") or []
    if len(names) > _MOST_TEMPLATES:
        raise values.error("tokenizer.chat_templates", f"at most {_MOST_TEMPLATES} names", str(len(names)))
    named = {name: text for name in names if (text := values.text(f"{_TEMPLATE}.{name}")) is not None}
    if not named:
        return {} if default is None else {"chat_template": default}
    found = named if default is None else {"default": default, **named}
    return {"chat_template": [{"name": name, "template": text} for name, text in found.items()]}


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, check_circular=False, separators=(",", ":")).encode()
