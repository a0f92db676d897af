"""Which parts of transformers' modules are replaced, and that what they compute is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from medusa_runtime.models.layers.whole import WholeAttention
from medusa_runtime.models.registry import model_config
from medusa_runtime.models.transformers import faster
from torch import nn

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
# Norms that round twice, once, and once with an offset; the last one's perceptron is not gated by SiLU.
CASES = {"Granite": (False, 0.0, True), "Olmo2": (True, 0.0, True), "Gemma": (True, 1.0, False)}


def made(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(**SHAPE)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.requires_grad_(False)


@pytest.mark.parametrize("name", CASES)
def test_parts_are_known_by_what_they_compute(name: str) -> None:
    once, offset, gated = CASES[name]
    module = made(name)
    ids = torch.tensor([[5, 17, 2, 88, 41]])
    with torch.inference_mode():
        expected = module(ids).logits
    norm, perceptron = module.model.norm, module.model.layers[0].mlp
    kinds = type(norm), type(perceptron)
    faster.use_our_parts(module, torch.bfloat16)
    formula: Any = type(norm).norm_formula
    assert (formula.once, formula.offset) == (once, offset)
    assert (type(perceptron) is not kinds[1]) == gated
    with torch.inference_mode():
        found = module(ids).logits
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert found.argmax(-1).equal(expected.argmax(-1))


def test_projections_of_one_input_are_computed_once_for_each_input() -> None:
    part = nn.Module()
    part.q_proj, part.k_proj, part.v_proj = (nn.Linear(8, size, dtype=torch.bfloat16) for size in (16, 8, 8))
    first, second = torch.randn(1, 3, 8).bfloat16(), torch.randn(1, 3, 8).bfloat16()
    projections = (part.q_proj, part.k_proj, part.v_proj)
    with torch.inference_mode():
        wanted = {x: [one(x) for one in projections] for x in (first, second)}
        faster.use_our_parts(part, torch.bfloat16)
        for x in (first, second, first, first):
            for one, expected in zip(projections, wanted[x], strict=True):
                torch.testing.assert_close(one(x), expected)
        torch.testing.assert_close(projections[0](first), wanted[first][0])  # and the others are not asked for
        torch.testing.assert_close(projections[1](second), wanted[second][1])


# Norms of q and k over all heads, over each head, and none; rotated by neighbours, which is not known.
ATTENTIONS = {"Olmo2": "whole", "Exaone4": "heads", "Granite": "", "Cohere": None}


def attentions(name: str, **changes: Any) -> list[Any]:
    """The attention modules of a decoder as the engine has it."""
    raw = json.loads(getattr(transformers, f"{name}Config")(**SHAPE | changes).to_json_string(use_diff=False))
    model: Any = model_config(raw | {"architectures": [f"{name}ForCausalLM"]}).model()
    return [layer.self_attn for layer in model.module.model.layers]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_is_known_by_what_it_gives_the_engine(name: str) -> None:
    (part,) = attentions(name)
    formula = getattr(part, "medusa_formula", None)
    theirs = type(part).__module__.startswith("transformers.")
    assert theirs == (formula is None)
    assert (None if formula is None else formula.norms) == ATTENTIONS[name]


@pytest.mark.parametrize(
    ("name", "changes"),
    [("Olmo", {"clip_qkv": 30.0}), ("Olmo", {"hidden_act": "gelu"}), ("Olmo2", {"hidden_act": "relu"})],
)
def test_a_model_is_not_taken_for_another_of_its_class(name: str, changes: dict[str, Any]) -> None:
    """Results of a trial were once kept by class, so that a second model was computed with the first one's settings."""
    for more in ({}, changes):
        config = getattr(transformers, f"{name}Config")(**SHAPE | more)
        torch.manual_seed(0)
        theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 4)  # large enough to be clipped
        raw = json.loads(config.to_json_string(use_diff=False))
        model: Any = model_config(raw | {"architectures": [f"{name}ForCausalLM"]}).model()
        model.module.load_state_dict(theirs.state_dict(), assign=True)
        ids = torch.tensor([5, 17, 2, 88, 41])
        with torch.inference_mode():
            found = model.run(ids, torch.arange(5), WholeAttention(), torch.arange(5))
            torch.testing.assert_close(found, theirs(ids[None]).logits[0], rtol=1e-3, atol=1e-2)


def test_layers_that_differ_have_options_of_their_own() -> None:
    kinds = ["sliding_attention", "full_attention"]
    parts = attentions("Olmo3", num_hidden_layers=2, layer_types=kinds, sliding_window=6)
    assert [part.medusa_formula.options["window"] for part in parts] == [6, None]
