"""Turns texts into vectors with an encoder such as BERT from a region, its tokenizer and its pooling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...checkpoint.index import WeightIndex
from ...config import Settings
from ...errors import ConfigError, ContextLengthError, MismatchError, RequestError, TooLargeError
from ...load.applier import Applier
from ...load.loader import Loader
from ...load.skeleton import skeleton
from ...models.architectures import classifying_decoder, is_encoder
from ...models.base import DTYPES
from ...models.bert import Bert, BertConfig
from ...models.embedder import SCORE, DecoderClassifier, DecoderEmbedder
from ...models.fields import Fields, ReadFile
from ...models.layers.dense import DenseLayers
from ...models.layers.pooling import POOLINGS, normalized
from ...models.registry import model_config
from ...models.sentences import SentenceEncoderSettings, embedding_decoder
from ...models.transformers.encoder import TransformersEncoder
from ...region.reader import Region
from ...state.kv_plan import token_bytes
from ...timeline import Timeline
from ..base import EmbedOptions
from ..checkpoint_files import added_end, read_config_json, weights_dtype, with_dtype
from ..serving.cut import Cut
from ..serving.tokenizer import Tokenizer
from ..torch.kv_size import free_bytes

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 256  # for which there must be room in memory


EncoderModel = Bert | DecoderEmbedder | TransformersEncoder


class Tokens(list[int]):
    """The token ids of a text or of a pair of texts.

    For a pair, ``segments`` has a 0 for each token of the first text and a 1 for each of the second; else it is empty.
    """

    def __init__(self, ids: Sequence[int], segments: Sequence[int] = ()) -> None:
        super().__init__(ids)
        self.segments = list(segments)


def build_encoder(
    read: ReadFile, index: WeightIndex, sentences: SentenceEncoderSettings, dtype: torch.dtype | None = None
) -> tuple[EncoderModel, DenseLayers, list[Applier]]:
    """Build the encoder that a checkpoint's small files describe, and the layers behind its pooling, as skeletons.

    Also returns the appliers that fill them, the encoder's first. Without a ``dtype``, it computes in the weights' own.
    """
    model, applier = _build_model(read, index, dtype)
    dense = DenseLayers(sentences.dense, model.config.hidden_size)
    if not len(dense.layers):
        return model, dense, [applier]
    applier.others = {name for name in index.tensors if dense.rename(name) is not None}
    return model, dense, [applier, dense.applier()]


def _build_model(read: ReadFile, index: WeightIndex, dtype: torch.dtype | None) -> tuple[EncoderModel, Applier]:
    raw = read_config_json(read)
    pooled = embedding_decoder(raw, read)
    if (decoder := pooled or classifying_decoder(raw)) is not None:
        config = model_config(with_dtype(decoder, index))
        config = config if dtype is None else replace(config, dtype=dtype)
        reader = (
            DecoderEmbedder(config)
            if pooled is not None
            else DecoderClassifier(config, raw, _labels(index, config.hidden_size))
        )
        return reader, reader.applier()
    dtype = dtype or DTYPES[weights_dtype(index)]
    if is_encoder(raw):
        with skeleton():
            model = Bert(BertConfig.from_hf(raw, pooler=False)).eval()
        return model, Applier(model, dtype=dtype, quantization=Fields(raw).quantization())
    foreign = TransformersEncoder(raw, dtype)
    return foreign, foreign.applier()


def _labels(index: WeightIndex, hidden_size: int) -> int:
    """Return the number of labels that a decoder's classifying head has. Raises MismatchError if there is none."""
    score = index.tensors.get(SCORE)
    if score is None or len(score.shape) != 2 or score.shape[1] != hidden_size or not score.shape[0]:
        found = "none" if score is None else f"one of shape {list(score.shape)}"
        raise MismatchError(f"{SCORE}: expected a tensor of shape [labels, {hidden_size}], found {found}")
    return score.shape[0]


@dataclass(frozen=True)
class EncoderOptions:
    """Options: the dtype to compute in (None: the weights' own), and the most tokens of a text (None: the model's)."""

    dtype: torch.dtype | None = None
    max_tokens: int | None = None


class Encoder:
    """An encoder or a sequence classifier with its tokenizer.

    Construction waits for the checkpoint's weight index, and the first ``encode`` waits, layer by layer, for the
    weights. Construction raises ModelError for a model of another kind, MismatchError if there is no config.json,
    ConfigError and CorruptError.
    """

    def __init__(self, region: Region, timeline: Timeline, options: EncoderOptions | None = None) -> None:
        options = options or EncoderOptions()
        self.sentences = SentenceEncoderSettings.read(region.file)
        index = region.wait_index()
        with timeline.stage("skeleton"):
            self._model, self._dense, appliers = build_encoder(region.file, index, self.sentences, options.dtype)
        self.config = self._model.config
        self.is_classifier = isinstance(self._model, DecoderClassifier) or (
            isinstance(self._model, TransformersEncoder) and self._model.is_classifier
        )
        self._loaders = [Loader(region, applier, timeline=timeline) for applier in appliers]
        self.max_tokens = self._resolve_max_tokens(options.max_tokens)
        if isinstance(self._model, DecoderEmbedder) and options.max_tokens is None:
            self.max_tokens = min(self.max_tokens, self._room(region, self._model, appliers[0]))
        ends_with = added_end(region.file) if isinstance(self._model, DecoderEmbedder) else None
        self.tokenizer = Tokenizer(region.file("tokenizer.json"), timeline, ends_with)

    @property
    def index(self) -> WeightIndex:
        """The weight index, as the encoder's loader uses it."""
        return self._loaders[0].index

    @property
    def size(self) -> int:
        """The length of a vector."""
        return self._dense.size

    def _resolve_max_tokens(self, wanted: int | None) -> int:
        own = min(self.config.longest, self.sentences.max_tokens or self.config.longest)
        if wanted is None:
            return own
        if wanted > self.config.longest:
            raise ConfigError(
                f"--max-model-len={wanted} cannot be used: expected at most the {self.config.longest} tokens that "
                "the model has positions for"
            )
        return wanted

    def _room(self, region: Region, embedder: DecoderEmbedder, applier: Applier) -> int:
        """Return how many tokens a text can have by the memory that is free beside the weights.

        Decoders take texts that are a hundred times as long as those of encoders. Raises TooLargeError for no room.
        """
        dtype = embedder.decoder.config.dtype
        free = free_bytes(region, self.index, Settings(), dtype, applier)
        token = token_bytes(
            self.index, hidden=self.config.hidden_size, vocabulary=self.config.vocab_size, item_bytes=dtype.itemsize
        )
        if (room := free // token) < min(_LEAST_TOKENS, self.max_tokens):
            raise TooLargeError(
                f"a text takes {token / 1e3:.0f} kB of memory for each token, and {max(free, 0) / 1e6:.0f} MB are free "
                f"beside the weights; expected room for {_LEAST_TOKENS} tokens: give the container more memory"
            )
        if room < self.max_tokens:
            logger.info("texts of up to %d tokens fit into memory, of %d that the model reads", room, self.max_tokens)
        return room

    def tokenize(self, item: str | Sequence[int] | Sequence[str], options: EmbedOptions | None = None) -> Tokens:
        """Return the token ids of a text or of a pair of texts. Token ids are kept as they are, or cut.

        Special tokens stay where texts are cut. Raises RequestError for an empty input and for ids outside the
        vocabulary, and ContextLengthError for an input that is too long.
        """
        options = options or EmbedOptions()
        most = self.max_tokens if options.truncate == -1 else options.truncate
        most = None if most is None else min(most, self.max_tokens)
        cut = Cut(most, options.most_first, options.most_second, options.truncate_left)
        if isinstance(item, str):
            found = Tokens(self._ids((item,), cut, options.add_special_tokens)[0])
        elif len(item) == 2 and isinstance(item[0], str):
            texts = (item[0], str(item[1])) if item[1] else (item[0],)  # as in transformers
            found = Tokens(*self._ids(texts, cut, add_special_tokens=True))
        else:
            found = Tokens(cut.ids(list(item)))  # type: ignore[arg-type]
        if not found:
            raise RequestError("input: expected at least one token, found an empty input", "input")
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

    def _ids(self, texts: tuple[str, ...], cut: Cut, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """Return the token ids of a text or a pair, and the text that each belongs to.

        Raises RequestError for a text that takes too long to tokenize. One that is cut may be longer.
        """
        for text in texts:
            check = self.tokenizer.check_size if cut else self.tokenizer.check_length
            check(text, self.max_tokens, name="input")
        if cut:
            return self.tokenizer.encode_cut(texts, cut, add_special_tokens)
        if len(texts) == 1:
            return self.tokenizer.encode(texts[0], add_special_tokens), []
        return self.tokenizer.encode_pair(*texts)

    def encode(self, texts: Sequence[Tokens]) -> Tensor:
        """Run the model on a batch of texts, and return their vectors, float32 [texts, size].

        A classifier's vector has the probability of each label.
        """
        return self.activated(self.pool(texts))

    def activated(self, vectors: Tensor, options: EmbedOptions | None = None) -> Tensor:
        """Return the vectors [..., size] that the model answers with, from those of ``pool``."""
        options = options or EmbedOptions()
        if self.is_classifier and isinstance(self._model, DecoderClassifier | TransformersEncoder):
            return vectors if options.activate is False else self._model.probabilities(vectors)
        if options.dimensions is not None:
            vectors = vectors[..., : options.dimensions]
        own = self.sentences.normalize or options.dimensions is not None
        return normalized(vectors) if options.activate or (own and options.activate is None) else vectors

    def pool(self, texts: Sequence[Tokens]) -> Tensor:
        """Run the model on a batch of texts, and return their vectors as they are before the activation."""
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        mask = torch.zeros(len(texts), longest, dtype=torch.bool)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = True
        segments = self._segments(texts, longest)
        hidden: Tensor = self._model(ids, None if bool(mask.all()) else mask, segments)
        if self.is_classifier:
            return hidden
        vectors: Tensor = self._dense(POOLINGS[self.sentences.pooling](hidden, mask).float())
        return vectors

    @staticmethod
    def _segments(texts: Sequence[Tokens], longest: int) -> Tensor | None:
        if not any(text.segments for text in texts):
            return None
        return torch.tensor([[*text.segments, *[0] * (longest - len(text.segments))] for text in texts])

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return a vector for each text, all in one batch; texts that are too long are cut.

        This is for functions that run an encoder themselves.
        """
        cut = EmbedOptions(truncate=-1)
        with torch.inference_mode():
            vectors: list[list[float]] = self.encode([self.tokenize(text, cut) for text in texts]).tolist()
        return vectors

    def wait(self) -> None:
        """Wait until weights and tokenizer are loaded. Raises the error of the one that failed."""
        for loader in self._loaders:
            loader.wait()
        self.tokenizer.wait(self.config.vocab_size)

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()
