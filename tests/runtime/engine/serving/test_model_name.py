"""The model's id when none is given: from the location, else from config.json."""

from __future__ import annotations

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.engine.serving.model_name import accepted_names, served_name

CONFIG = b'{"_name_or_path": "org/tiny-llama", "model_type": "llama"}'


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("examples/pydoc-lm", "pydoc-lm"),
        ("s3://key:secret@bucket/models/qwen/", "qwen"),
        ("s3://bucket", "bucket"),
        ("https://host/files/qwen/model.safetensors", "qwen"),
        ("hf://org/name", "name"),
        ("http://127.0.0.1:8112", "tiny-llama"),
        ("http://127.0.0.1:8112/model/", "tiny-llama"),
        ("/opt/ml/model", "tiny-llama"),
    ],
)
def test_a_name_that_says_something(model: str, name: str) -> None:
    assert served_name(Settings(model=model), lambda _: CONFIG) == name


def test_what_is_left_without_any() -> None:
    assert served_name(Settings(model="/opt/ml/model"), lambda _: b'{"model_type": "llama"}') == "llama"
    assert served_name(Settings(model="/opt/ml/model"), lambda _: b"no JSON") == "model"
    assert served_name(Settings(model="http://127.0.0.1:8112")) == "model"
    assert served_name(Settings(model="m", served_model_name="mine"), lambda _: CONFIG) == "mine"


def test_a_model_of_the_hub_may_be_asked_for_by_its_name_there() -> None:
    for revision in ("", "@main"):
        settings = Settings(model=f"hf://org/name{revision}", served_model_name="mine")
        assert accepted_names(settings) == ("mine", "org/name")
    assert accepted_names(Settings(model="/opt/ml/model"), lambda _: CONFIG) == ("tiny-llama", "model")
