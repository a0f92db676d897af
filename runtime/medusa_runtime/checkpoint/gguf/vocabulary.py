"""The vocabulary of a GGUF file: its tokens, their types, and those with a special meaning.

Source: llama.cpp's ``llama-vocab.cpp``.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

from ...errors import ModelError
from .metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens; 0 is a normal one, too
TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
_MOST_TOKENS = 1 << 21
_MOST_ADDED = 50_000  # tokens that are found in a text before all others. Models have up to 7,000
_MOST_ADDED_CHARACTERS = 1_000_000  # each takes up to 100 bytes of memory in the automaton that finds them

_SPECIAL = {  # as tokenizer_config.json names them → in the key of a GGUF file
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the format misspells it
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}

# Tokens that end a text. A file names some by id, but most models end a turn with another token, which llama.cpp finds
# by its text. _TYPED_ENDS may be ordinary text as well, which only their type tells.
_ENDS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>",
))  # fmt: skip
_TYPED_ENDS = frozenset(("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["))
_GO_ON = {  # tokens that do not end a text if the vocabulary has all the others: there, they end a part of it
    "<|end|>": (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")),
    "</s>": (("<|tool_response>",),),
}


class Vocabulary:
    """The tokens of a file, and what it says of them.

    ``types`` has a type for each token, ``special`` the ids of tokens like ``bos_token``, ``ends`` the ids of those
    that end a text, ``added`` the ids of those that are found in a text before it is split, and ``unused`` the tokens
    that only fill up. Raises CorruptError, and ModelError for a vocabulary that is too large.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.tokens = self._tokens()
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(self.ids) != len(self.tokens):
            twice = next(token for at, token in enumerate(self.tokens) if self.ids[token] != at)
            raise metadata.error(TOKENS, "tokens that all differ", f"{twice[:80]!r} twice")
        self.special = {name: at for name, key in _SPECIAL.items() if (at := self._special_id(key)) is not None}
        self.types = self._types()
        self.ends = self._ends()
        self.added = self.numbers(UNKNOWN, CONTROL, USER_DEFINED)
        self.unused = {self.tokens[at] for at in self.numbers(UNUSED)}
        characters = sum(len(self.tokens[at]) for at in self.added)
        if len(self.added) > _MOST_ADDED or characters > _MOST_ADDED_CHARACTERS:
            raise ModelError(
                f"{metadata.name}: expected at most {_MOST_ADDED} special tokens (type {UNKNOWN} to {USER_DEFINED} in "
                f"{TYPES}) of {_MOST_ADDED_CHARACTERS} characters together, found {len(self.added)} of {characters}; "
                "put the model's tokenizer.json beside the file"
            )

    def find_special(self, texts: dict[str, str]) -> None:
        """Find special tokens by their ``texts`` where the file has no key for them. They must be of such a type."""
        for name, text in texts.items():
            at = self.ids.get(text)
            named = f"tokenizer.ggml.{_SPECIAL[name]}_token_id" in self.metadata
            if not named and at is not None and self.types[at] in (UNKNOWN, CONTROL):
                self.special[name] = at

    def added_tokens(self, stripped: dict[int, str]) -> list[dict[str, Any]]:
        """Return the tokens that are found in a text before it is split, as tokenizer.json has them.

        ``stripped`` says for the ids of some whether they swallow white space: ``lstrip`` or ``rstrip``.
        """
        return [
            {
                "id": at,
                "content": self.tokens[at],
                "single_word": False,
                "lstrip": stripped.get(at) == "lstrip",
                "rstrip": stripped.get(at) == "rstrip",
                "normalized": False,
                "special": self.types[at] != USER_DEFINED,
            }
            for at in self.added
        ]

    def used(self, needed: set[str]) -> dict[str, int] | bytes:
        """Return the tokens' ids without the unused ones, which have no text, except for those that are ``needed``.

        It may be the JSON of them.
        """
        packed = None if self.has_empty else self.metadata.packed(TOKENS)
        if packed is not None:
            left_out = bytearray(len(self.tokens))
            for token in self.unused - needed:
                left_out[self.ids[token]] = 1
            if (text := packed.numbered_as_json(bytes(left_out))) is not None:
                return text
        ids = dict(self.ids) if self.unused else self.ids
        for token in self.unused - needed:
            del ids[token]
        return ids

    def _tokens(self) -> list[str]:
        tokens = self.metadata.strings(TOKENS)
        if not tokens:
            raise self.metadata.error(TOKENS, "an array of tokens", "none")
        if len(tokens) > _MOST_TOKENS:
            raise ModelError(f"{self.metadata.name}: expected at most {_MOST_TOKENS} tokens, found {len(tokens)}")
        self.has_empty = "" in tokens
        return [token or f"[EMPTY_{at}]" for at, token in enumerate(tokens)] if self.has_empty else tokens

    def numbers(self, *kinds: int) -> list[int]:
        """Return the numbers of all tokens of these types."""
        octets = bytes(self.types).translate(bytes(kind in kinds for kind in range(256)))
        return list(compress(range(len(octets)), octets))

    def _special_id(self, key: str) -> int | None:
        return self.metadata.token_id(f"tokenizer.ggml.{key}_token_id", len(self.tokens))

    def _types(self) -> list[int]:
        """Return the tokens' types. Those that can only end a text are control tokens, whatever the file says."""
        types = self.metadata.numbers(TYPES, len(self.tokens), int)
        if types is None:
            types = [NORMAL] * len(self.tokens)
            for at in self.special.values():
                types[at] = CONTROL
        if others := set(types).difference(range(BYTE + 1)):
            raise self.metadata.error(TYPES, f"types from 0 to {BYTE}", str(min(others)))
        wrong = [at for token in _ENDS & self.ids.keys() if types[at := self.ids[token]] == NORMAL]
        if wrong:
            types = list(types)
            for at in wrong:
                types[at] = CONTROL
        return types

    def _ends(self) -> list[int]:
        named = [self._special_id(key) for key in ("eos", "eot", "eom")]
        texts = {token for token in _ENDS | _TYPED_ENDS if token in self.ids}
        found = {at for token in texts if self.types[at := self.ids[token]] in (CONTROL, USER_DEFINED)}
        for token, others in _GO_ON.items():
            if token in texts and any(all(other in self.ids for other in each) for each in others):
                found.discard(self.ids[token])
        return sorted(found.union(at for at in named if at is not None))
