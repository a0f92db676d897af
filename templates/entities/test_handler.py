"""The served function with a model of nine words, and how tokens become entities."""

import json

import pytest
import torch
from medusa_adapters.trial import Trial
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from handler import joined

WORDS = {"[PAD]": "O", "[UNK]": "O", "[CLS]": "O", "[SEP]": "O", "Ada": "B-PER", "Lovelace": "I-PER", "London": "B-LOC"}
LABELS = ["O", "B-PER", "I-PER", "B-LOC"]
SIZE = 8


def write_model(folder):
    """Write a classifier without layers, whose answer for a word is the one in WORDS. It is made, not trained."""
    words = torch.eye(len(WORDS), SIZE)
    classifier = torch.zeros(len(LABELS), SIZE)
    for number, label in enumerate(WORDS.values()):
        classifier[LABELS.index(label), number] = 4.0
    embeddings = {
        "word_embeddings.weight": words,
        "position_embeddings.weight": torch.zeros(32, SIZE),
        "token_type_embeddings.weight": torch.zeros(2, SIZE),
        "LayerNorm.weight": torch.ones(SIZE),
        "LayerNorm.bias": torch.zeros(SIZE),
    }
    tensors = {f"bert.embeddings.{name}": tensor for name, tensor in embeddings.items()}
    tensors |= {"classifier.weight": classifier, "classifier.bias": torch.zeros(len(LABELS))}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["BertForTokenClassification"],
        "model_type": "bert",
        "vocab_size": len(WORDS),
        "hidden_size": SIZE,
        "num_hidden_layers": 0,
        "num_attention_heads": 1,
        "intermediate_size": SIZE,
        "max_position_embeddings": 32,
        "id2label": dict(enumerate(LABELS)),
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    folder = tmp_path_factory.mktemp("entities") / "model"
    write_model(folder)
    with Trial("--handler", "handler.py", "--engine", "none", "--model", str(folder)) as function:
        yield function


def test_finds_entities_and_where_they_are(function):
    answer = function.post("/", json.dumps({"text": "In London, Ada Lovelace wrote of engines. " * 9}))
    assert answer.status == 200, answer.text
    first, second, *more = answer.json["entities"]
    assert (first["kind"], first["text"], first["start"]) == ("LOC", "London", 3)
    assert (second["kind"], second["text"], second["start"]) == ("PER", "Ada Lovelace", 11)
    assert len(more) == 5, "what is longer than the model's 32 positions is cut"


def test_refuses_what_is_no_text(function):
    for given in ("", " ", 1, ["London"], None):
        assert function.post("/", json.dumps({"text": given})).status == 400


def test_joins_the_tokens_of_an_entity():
    def spans(*tokens):
        return [(found["kind"], found["start"], found["end"]) for found in joined(tokens)]

    first, last, rest = ("B-PER", 0.9, 0, 0, 3), ("I-PER", 0.8, 1, 4, 8), ("O", 0.9, 1, 8, 12)
    assert spans(first, last, rest, ("O", 0.9, 2, 12, 13), ("B-PER", 0.7, 3, 14, 17)) == [
        ("PER", 0, 12),
        ("PER", 14, 17),
    ]
    assert spans(first, ("B-PER", 0.7, 1, 4, 8)) == [("PER", 0, 3), ("PER", 4, 8)]
    assert spans(("LOC", 0.9, 0, 0, 3), ("PER", 0.9, 1, 4, 7)) == [("LOC", 0, 3), ("PER", 4, 7)]
    assert spans(("O", 0.9, 0, 0, 3), ("B-PER", 0.9, 0, 3, 5)) == []
