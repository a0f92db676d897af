"""The served function, on sentences that it was not trained on."""

import json

import pytest
from medusa_adapters.trial import Trial


@pytest.fixture(scope="module")
def function():
    with Trial("--handler", "handler.py", "--engine", "none", "--model", "model") as function:
        yield function


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("My brother thinks that the house is too small.", "en"),
        ("Mein Bruder denkt, dass das Haus zu klein ist.", "de"),
        ("Mon frère pense que la maison est trop petite.", "fr"),
        ("Mi hermano piensa que la casa es demasiado pequeña.", "es"),
    ],
)
def test_label(function, text, label):
    answer = function.post("/", json.dumps({"text": text}))
    assert answer.status == 200, answer.text
    assert answer.json["label"] == label
    assert sum(answer.json["scores"].values()) == pytest.approx(1, abs=1e-5)


def test_refuses_an_empty_text(function):
    assert function.post("/", '{"text": " "}').status == 400
