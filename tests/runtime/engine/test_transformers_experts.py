"""The experts of transformers' mixtures: used where they lie, whether a checkpoint has them one by one or fused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import Served, fill_region
from medusa_runtime.engine.checkpoint_files import read_config
from medusa_runtime.errors import MismatchError
from medusa_runtime.load.loader import Loader
from medusa_runtime.models.mixture import MOST_EXPERTS
from medusa_runtime.models.transformers import decoder
from medusa_runtime.models.transformers.experts import SeparateExperts, separate_experts
from medusa_runtime.region.pages import address_of
from safetensors.torch import load_file, save_file

from benchmarks.quantize import FORMATS, quantize

transformers = pytest.importorskip("transformers")

GATED = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "topk_group": 1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Phimoe": {"num_local_experts": 4},  # with other names in its checkpoints
    "GraniteMoe": {"num_local_experts": 4},  # its checkpoints have all experts in one tensor
    "DeepseekV3": LATENT,
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
}


def write(case: str, folder: Path) -> Path:
    config = getattr(transformers, f"{case}Config")(**GATED | CASES[case], initializer_range=0.3)
    torch.manual_seed(3)
    getattr(transformers, f"{case}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_experts_are_views_of_the_region(case: str, tmp_path: Path) -> None:
    region = fill_region(write(case, tmp_path))
    model = read_config(region).model()
    with Loader(region, model.applier(torch.bfloat16)) as loader:
        loader.wait()
    (shard,) = range(len(region.wait_index().shards))
    begin = address_of(region.shard(shard))
    end = begin + len(region.shard(shard))
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    layers = [part for part in model.modules() if isinstance(part, SeparateExperts)]
    assert len(experts) == len(layers) * 4 * 3 > 0
    assert [weight.shape for weight in experts if not begin <= weight.data_ptr() < end] == []
    region.close()


def test_fused_experts_give_the_same_tokens(tmp_path: Path, serve: Callable[..., Served]) -> None:
    plain = write("Olmoe", tmp_path / "plain")
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_bytes((plain / "config.json").read_bytes())
    state = load_file(plain / "model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([state.pop(f"{at}.{expert}.{name}_proj.weight") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        state |= {f"{at}.gate_up_proj": torch.cat((gate, up), 1), f"{at}.down_proj": down}
    save_file(state, fused / "model.safetensors")
    found = [[serve(folder).ask(prompt).tokens for prompt in ([5, 6, 7], [41] * 9)] for folder in (plain, fused)]
    assert found[0] == found[1]
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file(state | {name: state[name][:3].contiguous()}, fused / "model.safetensors")
    with pytest.raises(MismatchError, match=rf"{name}: expected \[4, 96, 32\] without gaps, found \[3, 96, 32\]"):
        serve(fused).engine.wait_ready()


@pytest.mark.parametrize("form", ["plain", "pack-4"])
def test_experts_that_are_not_replaced_get_floats_fused_as_transformers_does(
    form: str, tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write("Olmoe", tmp_path / "plain")
    if form != "plain":
        folder = tmp_path / form
        quantize(tmp_path / "plain", folder, form, options=FORMATS[form].options._replace(group=16))
    expected = serve(folder, dtype="float32").ask([5, 6, 7]).tokens
    monkeypatch.setattr(decoder, "separate_experts", lambda _: None)
    served = serve(folder, dtype="float32")
    assert served.ask([5, 6, 7]).tokens == expected
    fused = [part for part in served.engine._model.modules() if hasattr(part, "gate_up_proj")]
    assert [type(part.gate_up_proj) for part in fused] == [torch.nn.Parameter] * 2


def test_more_experts_than_any_model_has_are_no_modules() -> None:
    for count, replaced in ((4, True), (MOST_EXPERTS, False)):
        config = transformers.OlmoeConfig(**GATED, num_experts=count, num_experts_per_tok=2)
        with torch.device("meta"):
            model = transformers.OlmoeForCausalLM(config)
        separate_experts(model)  # of two layers
        assert any(isinstance(part, SeparateExperts) for part in model.modules()) is replaced


def test_experts_that_compute_something_else_are_left_alone() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.empty(4, 16, 8, device="meta"))
            self.down_proj = torch.nn.Parameter(torch.empty(4, 8, 8, device="meta"))
            self.act_fn = torch.nn.SiLU()

        def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            gate, up = (x @ self.gate_up_proj[chosen[:, 0]].sum(0).t()).chunk(2, -1)
            return (self.act_fn(gate) * up) @ self.down_proj[0].t()

    module = torch.nn.ModuleDict({"experts": Scaled()})
    separate_experts(module)
    assert type(module["experts"]) is Scaled
