"""What one forward shows offline: the order of tensors, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.errors import ModelError

SETTINGS = Settings(max_batched_tokens=64, max_concurrency=4, threads=1)


@pytest.fixture
def profiled() -> Callable[..., Any]:
    def run(folder: Path, settings: Settings = SETTINGS) -> Any:
        from fetching import fetch_into
        from medusa_runtime.engine.torch.profile import profile
        from medusa_runtime.region.reader import Region

        region = Region.create()
        try:
            fetch_into(region, str(folder), settings)
            found = profile(region, settings)
            assert sorted(found.order) == sorted(region.wait_index().tensors)
            return found
        finally:
            region.close()

    return run


def test_a_decoder_is_recorded_as_it_computes(profiled: Callable[..., Any], checkpoint: Path) -> None:
    order, _ = profiled(checkpoint)
    assert order[0] == "model.embed_tokens.weight"
    assert order[-2:] == ["model.norm.weight", "lm_head.weight"]
    inside = [name.removeprefix("model.layers.2.") for name in order if name.startswith("model.layers.2.")]
    assert [name.rpartition(".")[0].rpartition(".")[2] for name in inside] == [
        "input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj",
        "post_attention_layernorm", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    layers = [int(name.split(".")[2]) for name in order if ".layers." in name]
    assert layers == sorted(layers)


def test_a_plan_says_what_is_wanted_not_what_is_free_here(profiled: Callable[..., Any], checkpoint: Path) -> None:
    _, plan = profiled(checkpoint)
    assert (plan.max_model_len, plan.tokens) == (512, 4 * 512)
    assert dict(plan.layout) == {
        "layers": 4, "keys and values": 2, "blocks": 0, "tokens": 16, "kv_heads": 2, "head_dim": 16,
    }  # fmt: skip
    assert plan.block_bytes == 16 * 4 * 2 * 2 * 16 * 4
    assert plan.dtype == "float32"
    assert 0 < plan.activation_bytes < 64 << 20
    assert profiled(checkpoint, Settings(max_batched_tokens=64, max_concurrency=4, kv_cache_mb=1)).plan.blocks == 128


def test_where_memory_cannot_be_measured_it_is_calculated(
    profiled: Callable[..., Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from medusa_runtime.engine import forward_memory

    monkeypatch.setattr(forward_memory, "_CLEAR_REFS", Path("/proc/self/no-such-file"))
    _, plan = profiled(checkpoint)
    assert plan.activation_bytes == 64 * (3 * 128 + 6 * 64) * 4 + 2 * 4 * 320 * 4
    assert "cannot be measured" in caplog.text


def test_an_encoder_is_recorded_and_has_no_cache(profiled: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    BertModel(BertConfig(vocab_size=50, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path)
    order, plan = profiled(tmp_path)
    assert plan is None
    assert order.index("embeddings.word_embeddings.weight") < order.index("encoder.layer.0.output.dense.weight")
    assert order.index("encoder.layer.0.attention.self.query.weight") < order.index("encoder.layer.0.output.dense.bias")
    assert order.index("encoder.layer.0.output.dense.weight") < order.index("encoder.layer.1.output.dense.weight")


def test_a_model_that_no_engine_here_runs_is_refused(
    profiled: Callable[..., Any], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, architectures=["MambaForCausalLM"])
    config = (tmp_path / "config.json").read_text().replace("LlamaForCausalLM", "MambaForCausalLM")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        profiled(tmp_path)
