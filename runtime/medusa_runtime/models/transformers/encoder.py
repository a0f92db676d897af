"""Encoders and sequence classifiers of transformers, which read whole texts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...load.skeleton import skeleton
from ..fields import Fields
from ..layers.pooling import label_probabilities
from .applier import TransformersApplier
from .catalog import TransformersClass, find_class
from .config import own_class, own_config
from .construct import construct, own_attention


class Sizes(NamedTuple):
    """The sizes of an encoder that an engine needs.

    ``hidden_size`` is the length of the vectors that the encoder returns (a classifier's number of labels), and
    ``longest`` the number of tokens that a text can have at most.
    """

    vocab_size: int
    hidden_size: int
    longest: int


class TransformersEncoder(nn.Module):
    """An encoder or a sequence classifier of transformers.

    An encoder turns token ids [texts, tokens] into hidden states [texts, tokens, hidden]. A classifier turns them into
    a vector for each text [texts, labels], of which ``probabilities`` makes the probability of each label.
    """

    def __init__(self, raw: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.found_class: TransformersClass = find_class(raw)
        self._raw, self._dtype = raw, dtype
        self._quantization = Fields(raw).quantization()
        self.module = self._build()
        self.is_classifier = self.found_class.kind == "classifier"
        own = self.module.config
        self._several = getattr(own, "problem_type", None) == "multi_label_classification"
        self._pad: int | None = getattr(own, "pad_token_id", None)
        size = own.num_labels if self.is_classifier else own.hidden_size
        self.config = Sizes(own.vocab_size, size, self._longest(own))
        self._takes_segments = "token_type_ids" in inspect.signature(type(self.module).forward).parameters
        self._applier: TransformersApplier | None = None

    def forward(self, token_ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        if mask is not None and self.is_classifier:
            if self._pad is None:  # which is how decoders' classifiers find the last token
                return torch.cat([self._alone(row, mask, token_ids, segments) for row in range(len(token_ids))])
            token_ids = token_ids.masked_fill(~mask, self._pad)
        options: dict[str, Any] = {"attention_mask": torch.ones_like(token_ids) if mask is None else mask.long()}
        if self._takes_segments and segments is not None:
            options["token_type_ids"] = segments
        whole = self.module if self.is_classifier else self.module.base_model
        out = whole(input_ids=token_ids, return_dict=True, **options)
        if not self.is_classifier:
            hidden: Tensor = out.last_hidden_state
            return hidden
        logits: Tensor = out.logits.float()
        return logits

    def _alone(self, row: int, mask: Tensor, token_ids: Tensor, segments: Tensor | None) -> Tensor:
        place = slice(row, row + 1), slice(int(mask[row].sum()))
        return cast(Tensor, self(token_ids[place], segments=None if segments is None else segments[place]))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each label [..., labels]."""
        return label_probabilities(logits, several=self._several)

    def rename(self, name: str) -> str | None:
        target = None if self._applier is None else self._applier.target(name)
        return None if target is None else f"module.{target}"

    def applier(self) -> TransformersApplier:
        """Return the applier that fills the module from a region."""
        self._applier = TransformersApplier(self.module, self._build, self._dtype, self._quantization)
        return self._applier

    def _build(self) -> Any:
        kind = own_class(self.found_class)
        own = own_config(self.found_class, self._raw)
        own._attn_implementation = own_attention(kind)
        with skeleton():
            return construct(kind, own, self._dtype)

    def _longest(self, own: Any) -> int:
        positions = int(getattr(own, "max_position_embeddings", 512))
        for name, part in self.module.named_modules():
            # RoBERTa's positions begin after the padding's index.
            if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
                return positions - int(part.padding_idx) - 1
        return positions


__all__ = ["Sizes", "TransformersEncoder"]
