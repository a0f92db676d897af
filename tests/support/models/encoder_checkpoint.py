"""A tiny encoder with random weights, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "the", "mat", "was", "and", "on"]


def write_encoder(
    folder: Path, pooling: str | None, *, unit: bool = False, limit: int | None = None, heads: int = 4
) -> Path:
    """A tiny BERT with random weights and a tokenizer of words; with ``pooling`` as sentence-transformers saves it."""
    import torch
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": heads, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=24, **sizes)
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.3
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if pooling is not None:
        write_pooling(folder, pooling, unit=unit)
    if limit is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
    return folder


def write_pooling(folder: Path, pooling: str, *, unit: bool) -> None:
    """Write sentence-transformers' files for a model that pools in this way, and may make vectors of length 1."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if unit else [])]
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    listed = [{"path": paths[kind], "type": f"sentence_transformers.models.{kind}"} for kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name.startswith(pooling) for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes | {"word_embedding_dimension": 32}))


def write_dense(folder: Path, *outs: int, activation: str = "activation.Tanh", as_torch: bool = False) -> Any:
    """Put layers of these sizes behind the pooling of such a model, and return them as a module of torch."""
    import torch
    from safetensors.torch import save_file

    modules = json.loads((folder / "modules.json").read_text())
    ins = json.loads((folder / "config.json").read_text())
    layers, size = [], ins.get("hidden_size") or ins["dim"]
    for number, out in enumerate(outs, 2):
        linear = torch.nn.Linear(size, out, bias=number > 2)
        place = folder / f"{number}_Dense"
        place.mkdir()
        modules.insert(number, {"path": place.name, "type": "sentence_transformers.models.Dense"})
        sizes = {"in_features": size, "out_features": out, "bias": number > 2}
        (place / "config.json").write_text(
            json.dumps(sizes | {"activation_function": f"torch.nn.modules.{activation}"})
        )
        tensors = {f"linear.{name}": tensor.detach() for name, tensor in linear.named_parameters()}
        if as_torch:
            torch.save(tensors, place / "pytorch_model.bin")
        else:
            save_file(tensors, place / "model.safetensors")
        layers += [linear, getattr(torch.nn, activation.rpartition(".")[2])()]
        size = out
    (folder / "modules.json").write_text(json.dumps(modules))
    return torch.nn.Sequential(*layers)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of ``WORDS``."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: id for id, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    words.save(str(folder / "tokenizer.json"))
