"""The BPE of a GGUF file as tokenizer.json has it: of bytes (GPT-2's) or of characters (SentencePiece's).

Source: the ``tokenizers`` package, which reads the result, and llama.cpp's ``llama-vocab.cpp``.
"""

from __future__ import annotations

from itertools import chain, repeat
from math import isfinite
from operator import mul
from typing import Any

from ...errors import ConfigError, ModelError
from .metadata import Metadata
from .packed_strings import split_tokens
from .pretokenizers import BYTE_LEVEL, PRE_TOKENIZERS, PreTokenizer
from .vocabulary import NORMAL, TOKENS, Vocabulary

MERGES = "tokenizer.ggml.merges"
PRE = "tokenizer.ggml.pre"
_SCORES = "tokenizer.ggml.scores"
_MOST_MERGES = 1 << 21
_LONGEST = 1000  # characters of a token that is made from others
_MOST_WORK = 1 << 26  # of the tokens' squared lengths, since each is split at each character. Gemma's have 11 million
_FILLER = "[PAD"  # how converters begin the names of ids that the model's tokenizer does not have
_SPACE = "\u2581"  # how SentencePiece writes a space
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
Document = dict[str, Any]
Merges = list[str] | list[list[str]] | bytes  # bytes: their JSON


def pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    """Return how byte-level BPE splits a text into words. Raises ConfigError if the file does not say, or unknown."""
    name = metadata.text(PRE)
    if name in (None, "default"):
        # llama.cpp takes a splitting for these that no model was trained with, and warns that texts get worse.
        raise ConfigError(
            f"{metadata.name}: expected {PRE} to name how a text is split into words, found "
            f"{'no such key' if name is None else repr(name)}; convert the model with a newer llama.cpp, or put its "
            "tokenizer.json beside the file"
        )
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ConfigError(
            f"{metadata.name}: {PRE} is {name[:80]!r}, which is not supported; put the model's tokenizer.json beside "
            f"the file. Supported are {known}"
        ) from None


def byte_level(vocabulary: Vocabulary) -> Document:
    """Return the parts of tokenizer.json for GPT-2's BPE, whose tokens have a letter for each byte."""
    kind = pre_tokenizer(vocabulary.metadata)
    merges, needed = read_merges(vocabulary)
    return {
        "normalizer": kind.normalizer(),
        "pre_tokenizer": kind.pre_tokenizer(),
        "post_processor": {**BYTE_LEVEL, "trim_offsets": False},
        "decoder": BYTE_LEVEL,
        "model": _model(vocabulary, merges, needed, ignore_merges=kind.ignore_merges),
    }


def characters(vocabulary: Vocabulary, *, adds_space: bool) -> Document:
    """Return the parts for BPE of characters, with ``▁`` for a space and bytes for characters without a token.

    ``adds_space``: each text gets a space before it, which its tokens lose again. Without merges in the file, they are
    made from the tokens' scores.
    """
    merges, needed = read_merges(vocabulary) if MERGES in vocabulary.metadata else scored_merges(vocabulary)
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    fallback = all(byte in vocabulary.ids for byte in _BYTES)
    decoders: list[Document] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        *([{"type": "ByteFallback"}] if fallback else []),
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []),
    ]
    unknown = vocabulary.special.get("unk_token")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, escape]} if adds_space else escape,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **_model(vocabulary, merges, needed),
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": fallback,
        },
    }


def read_merges(vocabulary: Vocabulary) -> tuple[Merges, set[str]]:
    """Return the file's merges, and the unused tokens that they name or make. Raises CorruptError.

    There are 300,000 in a file, and a fetch waits for them. So nothing loops over them in Python, and whether they name
    tokens is left to the package that reads them.
    """
    metadata = vocabulary.metadata
    unused = {token for token in vocabulary.unused if not token.startswith(_FILLER)}
    packed = None if unused else metadata.packed(MERGES)
    if packed is not None and len(packed) <= _MOST_MERGES and (text := packed.pairs_as_json()) is not None:
        return text, unused
    merges = metadata.strings(MERGES)
    if merges is None:
        raise metadata.error(MERGES, "an array of pairs of tokens", "no such key")
    if len(merges) > _MOST_MERGES:
        raise metadata.error(MERGES, f"at most {_MOST_MERGES} pairs", str(len(merges)))
    result: list[str] | list[list[str]] = merges
    if merges and set(map(str.count, merges, repeat(" "))) != {1}:
        result = [[merge[: (at := merge.find(" ", 1))], merge[at + 1 :]] for merge in merges]
    elif "#version" in "\n".join(merges):  # the package takes such a line for the first one of a merges.txt
        result = [merge.split(" ") for merge in merges]
    if not unused:
        return result, unused
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in result]
    return result, unused.intersection(chain(chain.from_iterable(pairs), map("".join, pairs)))


def scored_merges(vocabulary: Vocabulary) -> tuple[Merges, set[str]]:
    """Return the merges that make each token from two others, those of the highest scores first.

    SentencePiece joins the two neighbours whose token has the highest score. Special tokens are never made from text.
    Returns no unused tokens.
    """
    tokens = vocabulary.tokens
    scores = vocabulary.metadata.numbers(_SCORES, len(tokens), float, int)
    if scores is None:
        raise vocabulary.metadata.error(_SCORES, f"{len(tokens)} numbers, one for each token", "no such key")
    if not all(map(isfinite, scores)):
        raise vocabulary.metadata.error(_SCORES, "finite numbers", "others")
    normal = vocabulary.numbers(0, NORMAL)
    lengths = list(map(len, map(tokens.__getitem__, normal)))
    if max(lengths, default=0) > _LONGEST or sum(map(mul, lengths, lengths)) > _MOST_WORK:
        raise ModelError(
            f"{vocabulary.metadata.name}: expected tokens of at most {_LONGEST} characters, whose squared lengths are "
            f"at most {_MOST_WORK} together, found longer ones; put the model's tokenizer.json beside the file"
        )
    normal.sort(key=scores.__getitem__, reverse=True)
    packed = None if vocabulary.has_empty else vocabulary.metadata.packed(TOKENS)
    found = None if packed is None else split_tokens(packed, normal)
    if found is not None and (text := found.pairs_as_json()) is not None:
        return text, set()
    pieces = set(map(tokens.__getitem__, normal))
    pairs = [
        (left, right)
        for token in map(tokens.__getitem__, normal)
        for cut in range(1, len(token))
        if (right := token[cut:]) in pieces and (left := token[:cut]) in pieces  # faster than the left part first
    ]
    joined = "".join(pieces)
    if " " in joined or "#version" in joined:
        return list(map(list, pairs)), set()
    return list(map(" ".join, pairs)), set()


def _model(vocabulary: Vocabulary, merges: Merges, needed: set[str], *, ignore_merges: bool = False) -> Document:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.used(needed),
        "merges": merges,
    }
