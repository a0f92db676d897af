"""A checkpoint of a model that always thinks and answers the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<assistant>{# </think> {{ tools }} #}"
    "{% if thinking is defined %}<think>{% if not thinking %}</think>{% endif %}{% endif %}"
)
THOUGHT = ["I", " add", " two", "."]
SAID = ["<assistant>", "<think>", *THOUGHT, "</think>", "Four", "</s>"]


def write_thinker(folder: Path) -> Path:
    """Write a Llama whose every token is followed by the next one of SAID: nothing but its embeddings counts.

    With ``thinking`` as an argument of its template, the prompt opens the reasoning, or closes it, too.
    """
    import torch

    words = [token for token in SAID if token != "</s>"]
    made = write_llama(folder, TEMPLATE, special=["<s>", "</s>"], words=words, eos=("</s>",))
    with made as (model, number), torch.no_grad():
        for token, following in itertools.pairwise(map(number, SAID)):
            model.lm_head.weight[following, token] = 2.0
    return folder


@contextmanager
def write_llama(
    folder: Path, template: str, *, special: Sequence[str], words: Sequence[str], eos: Sequence[str]
) -> Iterator[tuple[Any, Callable[[str], int]]]:
    """Write a small Llama of one layer that is given a token's embedding alone, and the numbers of tokens.

    Inside, its weights can be set: the layer adds nothing, and all logits are 0.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(words))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(template)
    size = 320
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=size, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=5, num_key_value_heads=5, max_position_embeddings=256, bos_token_id=0,
        eos_token_id=tokenizer.token_to_id(eos[0]),
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(config.vocab_size, size))
        for part in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj, model.lm_head):
            part.weight.zero_()
    yield model, tokenizer.token_to_id
    model.generation_config.eos_token_id = list(map(tokenizer.token_to_id, eos))
    model.save_pretrained(folder)
