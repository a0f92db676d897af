"""Every family against transformers, from the files it saves: the same logits, the same greedy text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from medusa_runtime.models import DecoderModel
from medusa_runtime.models.layers.whole import WholeAttention
from reference_models import CASES, PROMPT, loaded, logits, reference

pytest.importorskip("transformers")


def greedy(model: DecoderModel, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(logits(model, tokens)[-1].argmax()))
    return tokens


@pytest.fixture(autouse=True)
def _plainly() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors this small, threads on a busy machine only wait for each other
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
def test_agrees_in_fp32(case: str, tmp_path: Path) -> None:
    theirs = reference(case, tmp_path, torch.float32)
    with loaded(tmp_path) as ours:
        expected = theirs(torch.tensor([PROMPT])).logits[0]
        assert expected.std() > 0.1, "logits this close to each other would agree whatever we did"
        torch.testing.assert_close(logits(ours, PROMPT), expected, rtol=0, atol=1e-4)
        tokens = list(PROMPT)
        for _ in range(8):
            tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert greedy(ours, PROMPT, 8) == tokens


@pytest.mark.parametrize("case", ["qwen2-window", "qwen2-moe-window", "qwen3-moe-window"])
def test_windows_of_a_file_without_layer_types(case: str, tmp_path: Path) -> None:
    theirs = reference(case, tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_bytes())
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with loaded(tmp_path) as ours:
        torch.testing.assert_close(logits(ours, PROMPT), theirs(torch.tensor([PROMPT])).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-untied", "qwen2", "qwen3", "mistral-window", "gemma3", "opt", "falcon-7b"])
def test_agrees_in_bf16(case: str, tmp_path: Path) -> None:
    """As near to the exact logits as transformers is, when both compute in bf16."""
    theirs = reference(case, tmp_path, torch.bfloat16)
    with loaded(tmp_path) as ours:
        assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
        found = logits(ours, PROMPT).float()
        rounded = theirs(torch.tensor([PROMPT])).logits[0].float()
    exact = theirs.float()(torch.tensor([PROMPT])).logits[0]
    assert (found - exact).abs().mean() <= 1.5 * (rounded - exact).abs().mean()
    assert (found - exact).abs().max() <= 4 * (rounded - exact).abs().max()  # one element: a noisy measure


def test_sharded_files(tmp_path: Path) -> None:
    theirs = reference("llama-untied", tmp_path, torch.float32, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with loaded(tmp_path) as ours:
        torch.testing.assert_close(logits(ours, PROMPT), theirs(torch.tensor([PROMPT])).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-untied", "gemma3", "opt-350m", "falcon-7b"])
def test_layers_run_in_any_range(case: str, tmp_path: Path) -> None:
    reference(case, tmp_path, torch.float32)
    with loaded(tmp_path) as model:
        positions, attention = torch.arange(len(PROMPT)), WholeAttention()
        hidden = model.embed(torch.tensor(PROMPT), positions)
        whole = model.run_layers(hidden, positions, attention)
        first = model.run_layers(hidden, positions, attention, 0, 1)
        assert not torch.equal(first, whole)
        rest = model.run_layers(first, positions, attention, 1)
        torch.testing.assert_close(rest, whole, rtol=0, atol=0)
        torch.testing.assert_close(model.run_layers(hidden, positions, attention, 1, 1), hidden, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("case", "prefix"), [("llama-tied", "model."), ("opt", "model."), ("falcon-7b", "transformer.")]
)
def test_names_without_their_prefix(case: str, prefix: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = reference(case, tmp_path, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith(prefix) for name in stored)
    stored = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    if case != "opt":
        stored["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(stored, tmp_path / "model.safetensors")
    with loaded(tmp_path) as ours:
        torch.testing.assert_close(logits(ours, PROMPT), theirs(torch.tensor([PROMPT])).logits[0], rtol=0, atol=1e-4)
