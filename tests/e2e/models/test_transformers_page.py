"""The handler of docs/transformers.md, as it stands there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_checkpoint import WORDS, write_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

DOCS = Path(__file__).parents[3] / "docs"


LABELS = {0: "ANIMAL", 1: "O", 2: "THING"}


def write(folder: Path) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(2)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=24, id2label=LABELS, **sizes)
    model = transformers.BertForTokenClassification(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.3
    with torch.inference_mode():
        model.classifier.bias -= model(torch.arange(2, 10)[None]).logits[0].mean(0)  # so that words differ
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def test_it_finds_the_entities_that_transformers_finds(start: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = write(folder)
    page = (DOCS / "transformers.md").read_text()
    (tmp_path / "handler.py").write_text(page.split("```python\n# handler.py\n")[1].split("```")[0])
    serving = start("--engine", "none", "--model", folder, "--handler", tmp_path / "handler.py")
    status, answer, _ = serving.request("POST", "/", {"inputs": "the cat sat on a mat"})
    assert status == 200, answer

    encoded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the cat sat on a mat")
    with torch.inference_mode():
        scores = model(torch.tensor([encoded.ids])).logits[0].softmax(-1)
    best = [(LABELS[int(row.argmax())], span) for row, span in zip(scores, encoded.offsets, strict=True)][1:-1]
    assert len({label for label, _ in best}) > 1
    assert [(one["entity"], (one["start"], one["end"])) for one in answer] == [one for one in best if one[0] != "O"]
    assert serving.request("POST", "/", {"input": "x"})[0] == 400


@pytest.mark.parametrize(
    "name", ["BertForTokenClassification", "BertForQuestionAnswering", "T5ForConditionalGeneration"]
)
def test_an_engine_that_cannot_run_a_model_names_the_page(start: Callable[..., Any], tmp_path: Path, name: str) -> None:
    write(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    kind = "t5" if name.startswith("T5") else "bert"
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [name], "model_type": kind}))
    serving = start("--model", tmp_path)
    assert serving.process.wait(60) == 1
    assert "--engine vllm, or a handler that runs it (docs/transformers.md)" in serving.output()
