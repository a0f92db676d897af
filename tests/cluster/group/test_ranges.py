"""A model over ranges of its layers, in workers that run in turn: the same logits, bit for bit, at every split."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import SETTINGS, fill_region
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.engine.serving.sequence import Sequence, Span
from medusa_runtime.engine.serving.transcript import Transcript
from medusa_runtime.engine.torch.engine import TorchEngine
from medusa_runtime.engine.torch.kv_cache import BLOCK_TOKENS
from medusa_runtime.engine.torch.paged_attention import PagedAttention
from medusa_runtime.errors import ConfigError, ModelError
from medusa_runtime.models.layer_range import LayerRange, require_ranges
from medusa_runtime.timeline import Timeline
from torch import Tensor

transformers = pytest.importorskip("transformers")

SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
GATED = SHAPE | {"intermediate_size": 48, "max_position_embeddings": 64, "num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GATED),
    "llama-tied": ("Llama", GATED | {"tie_word_embeddings": True}),
    "llama-dynamic": ("Llama", GATED | {"max_position_embeddings": 10, "rope_parameters": DYNAMIC}),
    "mistral-window": ("Mistral", GATED | {"sliding_window": 5}),
    "qwen2-window": ("Qwen2", GATED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3-tied": ("Qwen3", GATED | {"head_dim": 16, "tie_word_embeddings": True}),
    "opt-tied": ("OPT", SHAPE | {"ffn_dim": 48, "max_position_embeddings": 64}),
    "opt-projected": ("OPT", SHAPE | {"ffn_dim": 48, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "falcon": ("Falcon", SHAPE | {"multi_query": True}),
    "falcon-untied": (
        "Falcon",
        SHAPE | {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
}
PROMPT = (5, 17, 2, 88, 41, 41, 9, 60, 3, 71, 12, 33, 90, 7, 54, 29, 8, 44)
STEPS = ((0, 11), (11, 17), (17, 18))  # two chunks of a prefill, and a decode


def write(case: str, folder: Path) -> Path:
    family, values = CASES[case]
    config = getattr(transformers, f"{family}Config")(**values, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(len(case))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


class Worker:
    """An engine over some layers, whose forward the test runs by itself."""

    def __init__(self, region: Any, layers: str | None) -> None:
        settings = replace(SETTINGS, layers=layers)
        self.engine = TorchEngine(region, settings, Timeline.create("engine"))
        self.engine.wait_ready()
        request = GenerateRequest("r", PROMPT, SamplingParams())
        transcript = Transcript(None, (), include_stop=False)
        self.sequence = Sequence(
            request, list(PROMPT), print, limit=64, eos_token_ids=frozenset(), transcript=transcript
        )
        self.sequence.blocks = self.engine._cache.blocks.allocate(-(-len(PROMPT) // BLOCK_TOKENS)) or []

    def run(self, start: int, stop: int, hidden: Tensor | None) -> Tensor:
        """The hidden states behind this worker's layers, and the logits behind the last."""
        layers, model = self.engine.layers, self.engine._model
        places = torch.arange(start, stop)
        attention = PagedAttention(self.engine._cache, [Span(self.sequence, start, stop)])
        if layers.is_first:
            hidden = model.embed(torch.tensor(PROMPT[start:stop]), places)
        assert hidden is not None
        hidden = model.run_layers(hidden, places, attention, layers.start, layers.stop)
        return model.logits(hidden) if layers.is_last else hidden


@pytest.mark.parametrize("case", CASES)
def test_two_workers_in_turn_make_the_same_logits(case: str, tmp_path: Path) -> None:
    region = fill_region(write(case, tmp_path))
    with ExitStack() as stack, torch.inference_mode():

        def worker(layers: str | None) -> Worker:
            made = Worker(region, layers)
            stack.callback(made.engine.close)
            return made

        whole = worker(None)
        expected = [whole.run(start, stop, None) for start, stop in STEPS]
        for split in range(1, 4):
            first, second = worker(f"0:{split}"), worker(f"{split}:4")
            for (start, stop), logits in zip(STEPS, expected, strict=True):
                found = second.run(start, stop, first.run(start, stop, None))
                assert torch.equal(found.view(torch.int16), logits.view(torch.int16)), (split, start)
    region.close()


def test_a_worker_loads_and_caches_its_own_layers_only(checkpoint: Path) -> None:
    region = fill_region(checkpoint)
    whole, first, last = (Worker(region, layers) for layers in (None, "0:1", "3:4"))
    loaded = {name for name, value in last.engine._model.named_parameters() if not value.is_meta}
    assert {name.partition(".")[0] for name in loaded} == {"layers", "norm", "lm_head"}
    assert all(name.startswith("layers.3.") for name in loaded if name.startswith("layers."))
    loaded = {name for name, value in first.engine._model.named_parameters() if not value.is_meta}
    assert {name.partition(".")[0] for name in loaded} == {"layers", "embed_tokens"}
    assert whole.engine._cache.shape.block_bytes == 4 * last.engine._cache.shape.block_bytes
    assert list(last.engine._cache.layers) == [3]
    for made in (whole, first, last):
        made.engine.close()
    region.close()


@pytest.mark.parametrize("text", ["4:2", "a:b", "0:5", "-1:2", "2"])
def test_a_range_that_the_model_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used: expected"):
        LayerRange.parse(text, 4)


def test_a_family_without_ranges_is_named(checkpoint: Path) -> None:
    region = fill_region(checkpoint)
    worker = Worker(region, None)
    kind = type("Whole", (type(worker.engine._model),), {"embedding_modules": ()})
    worker.engine._model.__class__ = kind
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be split over several workers"):
        require_ranges(worker.engine._model)
    worker.engine.close()
    region.close()
