"""Layers of transformers' decoders that are recorded and run as one call: the same tokens and the same numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import Served
from medusa_runtime.kernels.compiled import native_kernels
from medusa_runtime.models import programs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
if isinstance(native_kernels(), str):
    pytest.skip(str(native_kernels()), allow_module_level=True)

PROMPTS = ([5, 17, 2, 88, 41, 41, 9, 60, 3, 71, 12, 33, 90, 7, 54, 29], [8, 30, 77], [64, 4, 21, 9, 80, 15, 3])
TOKENS = 32
SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RECORDED: dict[str, dict[str, Any]] = {"Olmo2": {}, "Olmo3": {"sliding_window": 6}, "SmolLM3": {}}
OURS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": 6},
    "Qwen3": {"head_dim": 16},
}
NOT_RECORDED: dict[str, dict[str, Any]] = {
    "Granite": {"residual_multiplier": 0.5},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def write(name: str, folder: Path, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in key else 0.0))
    model.save_pretrained(folder)
    return model


def continued(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "eos_token_id": [], "do_sample": False}
    found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return found


def recorded(served: Served) -> dict[int, int]:
    """Return how many layers are recorded, for each number of tokens."""
    model: Any = served.engine._model
    found: dict[int, int] = {}
    layers = model.module.model.layers if hasattr(model, "module") else model.layers
    kept = layers[0].programs if layers is getattr(model, "layers", None) else layers[0].medusa_programs[0]
    for (_, rows), one in kept._found.items():
        found[rows] = found.get(rows, 0) + isinstance(one, programs._Recorded)
    return found


@pytest.mark.parametrize("name", RECORDED | OURS)
def test_recorded_layers_give_the_tokens_of_transformers(
    name: str, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    model = write(name, tmp_path, **(RECORDED | OURS)[name])
    served = serve(tmp_path)
    for _ in range(2):
        answers = [served.ask(prompt, max_tokens=TOKENS) for prompt in PROMPTS]
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, eos_token_id=[], do_sample=False
            )
            assert answer.tokens == expected[0, len(prompt) :].tolist()
    assert recorded(served)[len(PROMPTS)] == SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("name", RECORDED | OURS)
def test_recorded_layers_give_the_same_numbers(
    name: str, tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(name, tmp_path, **(RECORDED | OURS)[name])
    found = []
    for steps in (0, 10**9):
        monkeypatch.setattr(programs, "_STEPS", steps)
        served = serve(tmp_path)
        answers = [served.ask(prompt, max_tokens=TOKENS, logprobs=2).wait() for prompt in PROMPTS]
        found.append([[delta.logprobs for delta in answer.deltas] for answer in answers])
        assert any(recorded(served).values()) == (steps == 0)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_layers_that_do_more_run_as_before(name: str, tmp_path: Path, serve: Callable[..., Served]) -> None:
    model = write(name, tmp_path, **NOT_RECORDED[name])
    served = serve(tmp_path)
    assert served.ask(PROMPTS[0], max_tokens=TOKENS).tokens == continued(model, PROMPTS[0])
    assert recorded(served)[1] == 0
