"""A checkpoint of a model that writes as gpt-oss does, and always thinks and answers the same."""

from __future__ import annotations

import itertools
from pathlib import Path

from thinking_model import write_llama

# Beside these markers, the prompt ends as that of gpt-oss, whose template a comment makes it look like.
TEMPLATE = (
    "{# <|channel|>analysis<|message|> {{ tools }} #}{% for m in messages %}{{ m.content }}{% endfor %}"
    "<|start|>assistant"
)
MARKERS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
THOUGHT = ["I", " add", " two", "."]
FIRST = ["assistant", "<|channel|>", "analysis", "<|message|>", *THOUGHT, "<|end|>", "<|start|>", "assistant"]
SECOND = ["<|channel|>", "final", "<|message|>", "Four", "<|return|>"]
_SIZE, _SEEN = 320, 319


def write_harmony_thinker(folder: Path) -> Path:
    """Write a Llama that writes FIRST and then SECOND.

    Each token is followed by the next one of FIRST. Its attention sees whether there is an <|end|> among the tokens so
    far, which makes those of SECOND a little likelier where both have a token.
    """
    import torch

    words = [token for token in (*FIRST, *SECOND) if token not in MARKERS]
    special = ["<s>", "</s>", *MARKERS]
    made = write_llama(folder, TEMPLATE, special=special, words=words, eos=("</s>", "<|return|>", "<|call|>"))
    with made as (model, number), torch.no_grad():
        attention = model.model.layers[0].self_attn
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            part.weight.zero_()
        attention.v_proj.weight[0, number("<|end|>")] = 1.0
        attention.o_proj.weight[_SEEN, 0] = 1.0
        for token, following in itertools.pairwise(map(number, FIRST)):
            model.lm_head.weight[following, token] = 2.0
        for token, following in itertools.pairwise(map(number, SECOND)):
            model.lm_head.weight[following, token] = 1.98
        for token in ("final", "Four"):
            model.lm_head.weight[number(token), _SEEN] = 0.5
    return folder
