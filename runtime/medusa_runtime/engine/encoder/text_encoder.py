"""Texts → vectors: a BERT-like encoder of a region, with its tokenizer and its pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError, ContextLengthError, RequestError
from ...load.applier import Applier
from ...load.loader import Loader
from ...load.skeleton import skeleton
from ...models.base import DTYPES
from ...models.bert import Bert, BertConfig
from ...models.pooling import POOLINGS, unit
from ...models.sentences import Sentences
from ...region.reader import Region
from ...timeline import Timeline
from ..checkpoint_files import read_config_json, weights_dtype
from ..serving.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reading:
    """How to read: ``dtype`` to compute in (None: the weights' own), ``max_tokens`` of a text (None: the model's)."""

    dtype: torch.dtype | None = None
    max_tokens: int | None = None


class Encoder:
    """Construction waits for the checkpoint's index; the first ``encode`` waits, layer by layer, for the weights.

    Raises ModelError for a model of another kind, MismatchError without a config.json, ConfigError and CorruptError.
    """

    def __init__(self, region: Region, timeline: Timeline, reading: Reading | None = None) -> None:
        reading = reading or Reading()
        raw = read_config_json(region)
        self.config = BertConfig.from_hf(raw, pooler=False)
        self.sentences = Sentences.read(region.file)
        self.max_tokens = self._longest(reading.max_tokens)
        dtype = reading.dtype or DTYPES[weights_dtype(region.wait_index())]
        with timeline.stage("skeleton"), skeleton():
            self._model = Bert(self.config).eval()
        self._loader = Loader(region, Applier(self._model, dtype=dtype), timeline=timeline)
        self.tokenizer = Tokenizer(region.file("tokenizer.json"), timeline)

    @property
    def size(self) -> int:
        """Numbers of a vector."""
        return self.config.hidden_size

    def _longest(self, wanted: int | None) -> int:
        own = min(self.config.longest, self.sentences.max_tokens or self.config.longest)
        if wanted is None:
            return own
        if wanted > self.config.longest:
            raise ConfigError(
                f"--max-model-len={wanted} cannot be used: expected at most the {self.config.longest} tokens that "
                "the model has positions for"
            )
        return wanted

    def tokens(self, given: str | Sequence[int], most: int | None = None) -> list[int]:
        """The token ids of a text, special tokens included; ids are taken as they are.

        What is longer than ``most`` is cut there. RequestError for what is empty, too long or no id of the model.
        """
        if isinstance(given, str):
            if most is None:
                self.tokenizer.check_length(given, self.max_tokens, name="input")
            found = self.tokenizer.encode(given, True)
        else:
            found = list(given)
        if not found:
            raise RequestError("input: expected at least one token, found an empty input", "input")
        if most is not None:
            # As tokenizers cut: what a text ends with, BERT's [SEP], stays at its end.
            most = min(most, self.max_tokens)
            found = found if len(found) <= most else [*found[: most - 1], found[-1]]
        if len(found) > self.max_tokens:
            raise ContextLengthError(
                f"this model's maximum context length is {self.max_tokens} tokens, and the input has {len(found)}; "
                "expected a shorter input, or truncate_prompt_tokens",
                "input",
            )
        for token in found:
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(f"input: expected token ids below {self.config.vocab_size}, found {token}", "input")
        return found

    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Token ids of each text → float32 [texts, size]."""
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        mask = torch.zeros(len(texts), longest, dtype=torch.bool)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = True
        hidden = self._model(ids, None if bool(mask.all()) else mask)
        vectors = POOLINGS[self.sentences.pooling](hidden, mask).float()
        return unit(vectors) if self.sentences.unit else vectors

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector for each text, all in one batch; longer texts are cut. For a function that runs its own encoder."""
        with torch.inference_mode():
            vectors: list[list[float]] = self.encode([self.tokens(text, self.max_tokens) for text in texts]).tolist()
        return vectors

    def wait(self) -> None:
        """Until weights and tokenizer are there. Raises what came instead."""
        self._loader.wait()
        self.tokenizer.wait()

    def close(self) -> None:
        self._loader.close()
