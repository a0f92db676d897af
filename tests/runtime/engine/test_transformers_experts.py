"""The experts of transformers' mixtures: used where they lie, whether a checkpoint has them one by one or fused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import Served, fill_region
from medusa_runtime.engine.checkpoint_files import read_config
from medusa_runtime.errors import ConfigError, MismatchError
from medusa_runtime.load.loader import Loader
from medusa_runtime.models.sizes import MOST_EXPERTS
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


def load(folder: Path) -> None:
    region = fill_region(folder)
    try:
        with Loader(region, read_config(region.file, region.wait_index()).model().applier(torch.bfloat16)) as loader:
            loader.wait()
    finally:
        region.close()


@pytest.mark.parametrize("case", CASES)
def test_experts_are_views_of_the_region(case: str, tmp_path: Path) -> None:
    region = fill_region(write(case, tmp_path))
    model = read_config(region.file, region.wait_index()).model()
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


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_local_experts": 0}, MismatchError, r"of another shape: .*input_linear\.weight \(expected \[0, 96, 32\]"),
        ({"num_local_experts": -1}, ConfigError, r"transformers accepts for GraniteMoeForCausalLM, found: .*negative"),
        ({"num_local_experts": None}, ConfigError, "transformers accepts for GraniteMoeForCausalLM, found: "),
        ({"pad_token_id": 10**6}, ConfigError, r"transformers accepts for GraniteMoeForCausalLM, found: .*[Pp]adding"),
        ({"num_experts_per_tok": 5}, ConfigError, "num_experts_per_tok to be 1 to 4, the number of experts, found 5"),
        ({"num_experts_per_tok": -1}, ConfigError, "num_experts_per_tok to be 1 to 4, the number of experts, found -1"),
    ],
    ids=str,
)
def test_absurd_numbers_of_experts_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    raw = json.loads((write("GraniteMoe", tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(error, match=message):
        load(tmp_path)


def test_more_experts_than_any_model_has_are_no_modules() -> None:
    for count, replaced in ((4, True), (MOST_EXPERTS, False)):
        config = transformers.OlmoeConfig(**GATED, num_experts=count, num_experts_per_tok=2)
        config._experts_implementation = "eager"
        with torch.device("meta"):
            model = transformers.OlmoeForCausalLM(config)
        separate_experts(model)  # of two layers
        assert any(isinstance(part, SeparateExperts) for part in model.modules()) is replaced


class Limited(torch.nn.Module):
    """Experts that limit their gates, as those of some models do, each layer in its own way."""

    def __init__(self, limit: float | None) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(4, 16, 8, device="meta"))
        self.down_proj = torch.nn.Parameter(torch.empty(4, 8, 8, device="meta"))
        self.act_fn = torch.nn.SiLU()
        self.limit = limit

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for token, place in ((token, place) for token in range(len(x)) for place in range(chosen.shape[1])):
            expert = chosen[token, place]
            gate, up = (self.gate_up_proj[expert] @ x[token]).chunk(2)
            gate = gate if self.limit is None else gate.clamp(max=self.limit)
            out[token] += shares[token, place] * (self.down_proj[expert] @ (self.act_fn(gate) * up))
        return out


def test_experts_with_a_limit_are_left_alone() -> None:
    layers = torch.nn.ModuleList(torch.nn.ModuleDict({"experts": Limited(limit)}) for limit in (None, 20.0, 7.0, None))
    separate_experts(layers)
    replaced = [isinstance(layer["experts"], SeparateExperts) for layer in layers]  # type: ignore[index]
    assert replaced == [True, False, False, True]


def test_experts_whose_checkpoint_has_them_transposed_are_left_fused(
    tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers turns the tensors of some models around; one expert's part of them is none of its weights."""
    from transformers import conversion_mapping, core_model_loading

    plain, turned = write("GraniteMoe", tmp_path / "plain"), tmp_path / "turned"
    expected = serve(plain).ask([5, 6, 7]).tokens
    names = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
    mapping = [
        core_model_loading.WeightRenaming(r"\.router\.layer\.weight", ".router.weight"),
        *(
            core_model_loading.WeightConverter(
                rf"block_sparse_moe\.{name}\.weight",
                f"block_sparse_moe.experts.{target}",
                [core_model_loading.Transpose(1, 2)],
            )
            for name, target in names.items()
        ),
    ]
    turned.mkdir()
    (turned / "config.json").write_bytes((plain / "config.json").read_bytes())
    state = {
        name: tensor.transpose(1, 2).contiguous() if "put_linear" in name else tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    save_file(state, turned / "model.safetensors")
    known = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda kind: mapping if kind == "granitemoe" else known(kind),
    )
    served = serve(turned)
    assert served.ask([5, 6, 7]).tokens == expected
    assert not any(isinstance(part, SeparateExperts) for part in served.engine._model.modules())


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
