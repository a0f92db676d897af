"""Decoders that turn texts into vectors (Qwen3-Embedding, EmbeddingGemma) or into labels (Qwen3-Reranker)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..load.applier import Applier
from ..load.skeleton import skeleton
from .base import ModelConfig
from .layers.linear import Linear
from .layers.pooling import label_probabilities
from .layers.whole import WholeTexts
from .transformers.encoder import Sizes

SCORE = "score.weight"  # the tensor of a classifier's head [labels, hidden]


class DecoderEmbedder(nn.Module):
    """Turns token ids [texts, tokens] into hidden states [texts, tokens, hidden].

    A token sees the earlier ones, and of a model like EmbeddingGemma the later ones, too. The states are those behind
    the last norm, and there is no head. A text of a causal model has at most as many tokens as a layer's window, if
    there is one. Raises ModelError for a family that cannot do without its head.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.decoder = config.model()
        if not hasattr(self.decoder, "lm_head") or not hasattr(self.decoder, "norm"):
            raise ModelError(
                f"{config.architecture} makes no embeddings; expected a decoder such as Qwen3ForCausalLM, or an encoder"
            )
        del self.decoder.lm_head
        windows = [] if config.sees_later else filter(None, config.windows)
        longest = min([config.max_positions, *windows])
        self.config = Sizes(config.vocab_size, config.hidden_size, longest)

    def forward(self, token_ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Run the decoder. ``mask`` [texts, tokens] is false for the padding behind texts. There are no segments."""
        present = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask
        positions = torch.arange(token_ids.shape[1]).expand(token_ids.shape)[present]
        attention = WholeTexts(present.sum(1).tolist(), sees_later=self.decoder.config.sees_later)
        hidden = self.decoder.embed(token_ids[present], positions)
        norm = cast(nn.Module, self.decoder.norm)
        hidden = cast(Tensor, norm(self.decoder.run_layers(hidden, positions, attention)))
        out = hidden.new_zeros(*token_ids.shape, hidden.shape[-1])
        out[present] = hidden
        return out

    def rename(self, name: str) -> str | None:
        target = self._target(name)
        return None if target is None else f"decoder.{target}"

    def _target(self, name: str) -> str | None:
        target = self.decoder.rename(name)
        return None if target == "lm_head.weight" else target

    def applier(self) -> Applier:
        """Return the applier that fills the decoder from a region."""
        own = self.decoder.config
        return Applier(
            self.decoder,
            dtype=own.dtype,
            rename=self._target,
            quantization=own.quantization,
            divide=self.decoder.divide,
        )


class DecoderClassifier(DecoderEmbedder):
    """Turns token ids [texts, tokens] into a vector for each text [texts, labels], from its last token's hidden state.

    As in transformers, tokens that are the config.json's ``pad_token_id`` are not the last one.
    """

    def __init__(self, config: ModelConfig, raw: Mapping[str, Any], labels: int) -> None:
        """Take the fields of the classifier from ``raw``, its config.json."""
        super().__init__(config)
        with skeleton():
            self.decoder.score = Linear(config.hidden_size, labels, bias=False).eval()
        self.config = self.config._replace(hidden_size=labels)
        self._pad = raw.get("pad_token_id")
        self._several = raw.get("problem_type") == "multi_label_classification"

    def forward(self, token_ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Run the decoder and its head, float32 [texts, labels]."""
        hidden = super().forward(token_ids, mask)
        own = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask
        if self._pad is not None:
            own = own & (token_ids != self._pad)
        last = (own * torch.arange(token_ids.shape[1])).argmax(1)
        score = cast(nn.Module, self.decoder.score)
        return cast(Tensor, score(hidden[torch.arange(len(hidden)), last])).float()

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each label [..., labels]."""
        return label_probabilities(logits, several=self._several)

    def _target(self, name: str) -> str | None:
        return name if name == SCORE else super()._target(name)


__all__ = ["SCORE", "DecoderClassifier", "DecoderEmbedder"]
