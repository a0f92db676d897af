"""Serving before the weights are there, and what happens when they do not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fixtures import fill_region
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError, CorruptError, EngineError, MedusaError
from waiting import until


class Arriving:
    """A region whose tensors a test lets in one by one."""

    def __init__(self, checkpoint: Path) -> None:
        from medusa_runtime.checkpoint.index import Shard, TensorEntry, WeightIndex
        from medusa_runtime.region.reader import Region
        from safetensors.torch import load_file

        state = load_file(checkpoint / "model.safetensors")
        self._data = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
        shards, tensors, offset = [], {}, 0
        for number, (name, data) in enumerate(self._data.items()):
            shards.append(Shard(f"{name}.safetensors", 8 + len(data), 8, "v1", None, offset))
            tensors[name] = TensorEntry(number, 0, len(data), "F32", tuple(state[name].shape))
            offset += -(-len(data) // 4096) * 4096
        self.index = WeightIndex(shards, tensors)
        self.region = Region.create()
        self.writer = self.region.writer()
        self.writer.lay_out(self.index, {file.name: file.read_bytes() for file in checkpoint.glob("*.json")})

    def let_in(self, chosen: Callable[[str], bool]) -> None:
        for name in [name for name in self._data if chosen(name)]:
            (chunk,) = self.writer.chunks.of_tensor(name)
            with self.writer.buffer(chunk) as buffer:
                buffer[:] = self._data.pop(name)
            self.writer.publish(chunk)


@pytest.fixture
def arriving(checkpoint: Path) -> Iterator[Arriving]:
    made = Arriving(checkpoint)
    yield made
    made.writer.close()
    made.region.close()


def in_last_layer(name: str) -> bool:
    return ".layers.3." in name


def until_a_forward_waits(served: Any) -> None:
    until(lambda: served.engine.stats()["running"])


def test_a_prefill_starts_at_once_and_ends_when_the_last_layer_is_there(
    serve: Any, serve_region: Any, arriving: Arriving
) -> None:
    expected = serve().ask("Tokens flow").text
    served = serve_region(arriving.region)
    answer = served.ask("Tokens flow")
    until_a_forward_waits(served)
    arriving.let_in(lambda name: not in_last_layer(name))
    late = served.ask("Tokens flow")
    time.sleep(0.05)
    assert answer.incoming.empty()
    arriving.let_in(in_last_layer)
    arriving.writer.finish()
    assert answer.text == late.text == expected
    served.engine.wait_ready()
    stages = {stage.name for stage in served.timeline.stages()}
    assert stages >= {"skeleton", "tokenizer", "kv_plan", "first_forward", "first_token", "apply", "wait"}


@pytest.mark.parametrize("family", ["GPT2", "Olmoe"])
def test_a_module_of_transformers_runs_as_far_as_its_weights_are_there(
    family: str, tmp_path: Path, serve: Any, serve_region: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 97}
    experts = {"num_key_value_heads": 2, "intermediate_size": 48, "num_experts": 2, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{family}Config")(**sizes | (experts if family == "Olmoe" else {}))
    kind = transformers.GPT2LMHeadModel if family == "GPT2" else transformers.OlmoeForCausalLM
    kind(config).save_pretrained(tmp_path)
    expected = serve(tmp_path).ask([5, 6, 7]).tokens
    arriving = Arriving(tmp_path)
    try:
        served = serve_region(arriving.region)
        answer = served.ask([5, 6, 7])
        until_a_forward_waits(served)
        last = (".h.3.", ".layers.3.")
        arriving.let_in(lambda name: not any(part in name for part in last))
        time.sleep(0.1)
        assert answer.incoming.empty()
        arriving.let_in(lambda name: True)
        arriving.writer.finish()
        assert answer.tokens == expected
        assert "wait" in {stage.name for stage in served.timeline.stages()}
    finally:
        arriving.writer.close()


@pytest.mark.parametrize("family", ["Qwen3Moe", "Olmoe"])  # ours, and a module of transformers
def test_a_mixture_waits_only_for_the_experts_that_it_uses(
    family: str, tmp_path: Path, serve: Any, serve_region: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97, "head_dim": 8}
    experts = {"num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 2}
    size = {"moe_intermediate_size": 24} if family == "Qwen3Moe" else {"intermediate_size": 24}
    config = getattr(transformers, f"{family}Config")(**sizes, **experts, **size, initializer_range=0.3)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    whole, used = serve(tmp_path), set()
    for name, part in whole.engine._model.named_modules():
        if name.rpartition(".")[2].isdigit() and ".experts." in name:
            part.register_forward_hook(lambda *_, name=name: used.add(name.removeprefix("module.model.")))
    expected = whole.ask([5, 6, 7], max_tokens=3).tokens
    assert 0 < len(used) < 3 * 16
    arriving = Arriving(tmp_path)
    try:
        served = serve_region(arriving.region)
        answer = served.ask([5, 6, 7], max_tokens=3)
        until_a_forward_waits(served)
        arriving.let_in(lambda name: "experts" not in name)
        assert answer.incoming.empty()
        arriving.let_in(lambda name: any(f"{expert}." in name for expert in used))
        assert answer.tokens == expected
        assert not served.engine._loader.applied
        arriving.let_in(lambda name: True)
        arriving.writer.finish()
    finally:
        arriving.writer.close()


def test_a_request_cancelled_while_it_waits_for_weights_gets_no_token(serve_region: Any, arriving: Arriving) -> None:
    served = serve_region(arriving.region)
    answer, queued = served.ask("Tokens flow"), served.ask("from storage")
    until_a_forward_waits(served)
    served.engine.cancel(answer.id)
    arriving.let_in(lambda name: True)
    arriving.writer.finish()
    assert (answer.last.finish_reason, answer.tokens) == ("cancelled", [])
    assert queued.last.finish_reason == "length"
    assert served.engine.stats()["kv_tokens_used"] == 0


def test_a_failed_fetch_ends_requests_and_the_engine(serve_region: Any, arriving: Arriving) -> None:
    served = serve_region(arriving.region)
    answers = [served.ask("Tokens flow"), served.ask("from storage")]
    until_a_forward_waits(served)
    arriving.writer.fail(CorruptError("model.safetensors: expected 10 bytes, found 9"))
    for answer in answers:
        assert answer.last.error == ("Weights.Corrupt", "model.safetensors: expected 10 bytes, found 9")
    served.thread.join(120)
    assert [type(error) for error in served.errors] == [CorruptError]
    with pytest.raises(CorruptError, match="found 9"):
        served.engine.wait_ready()
    with pytest.raises(CorruptError, match="found 9"):
        served.ask("Tokens flow")


def test_an_idle_engine_ends_with_a_failed_fetch_too(serve_region: Any, arriving: Arriving) -> None:
    served = serve_region(arriving.region)
    arriving.writer.fail(CorruptError("broken"))
    served.thread.join(120)
    assert [str(error) for error in served.errors] == ["broken"]


def test_an_engine_that_is_closed_while_it_waits_ends_its_requests(serve_region: Any, arriving: Arriving) -> None:
    served = serve_region(arriving.region)
    answer = served.ask("Tokens flow")
    until_a_forward_waits(served)
    served.stop.set()
    served.engine.close()
    assert answer.last.error is not None
    served.thread.join(120)
    assert not served.thread.is_alive()


def test_a_step_that_fails_ends_its_requests_but_not_the_engine(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    expected = served.ask("Tokens flow").tokens
    model = served.engine._model
    whole = model.logits

    def fail(hidden: Any) -> Any:
        model.logits = whole
        raise RuntimeError("not enough memory")

    model.logits = fail
    answer = served.ask("Tokens flow")
    assert answer.last.error is not None
    assert answer.last.error[0] == EngineError.code
    assert "not enough memory" in answer.last.error[1]
    assert served.ask("Tokens flow").tokens == expected
    assert served.engine.stats()["kv_tokens_used"] == 0

    def always(hidden: Any) -> Any:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(model, "logits", always, raising=False)
    for _ in range(3):
        assert served.ask("Tokens flow").last.finish_reason == "error"
    served.thread.join(120)
    assert isinstance(served.errors[0], MedusaError)


def test_room_is_left_for_what_a_cpu_with_16_bit_products_compiles(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_runtime.engine.torch import kv_size
    from medusa_runtime.engine.torch.engine import TorchEngine
    from medusa_runtime.kernels.cpu import FAST_IN_TORCH
    from medusa_runtime.timeline import Timeline

    region, settings = fill_region(checkpoint), Settings(device="cpu", dtype="bfloat16")
    monkeypatch.setattr(kv_size, "memory_available_bytes", lambda: 100 << 20)

    def start(*features: str) -> None:
        found = SimpleNamespace(features=lambda: frozenset(features), FAST_IN_TORCH=FAST_IN_TORCH)
        monkeypatch.setattr(kv_size, "cpu", found)
        TorchEngine(region, settings, Timeline.create("engine")).close()

    start("avx2")
    with pytest.raises(ConfigError, match="give the container more memory"):
        start("avx2", "amx_bf16")
    region.close()


def test_an_engine_that_replaces_another_has_its_cache(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel has just killed still has its memory for a moment, and nothing would be free."""
    from medusa_runtime.engine.torch import kv_size
    from medusa_runtime.engine.torch.engine import TorchEngine
    from medusa_runtime.timeline import Timeline

    region, timeline = fill_region(checkpoint), Timeline.create("engine")
    sizes = []
    for free in (1 << 30, 0):
        monkeypatch.setattr(kv_size, "memory_available_bytes", lambda free=free: free)
        engine = TorchEngine(region, Settings(device="cpu"), timeline)
        sizes.append((engine.info.kv_tokens, engine.info.max_model_len))
        engine.close()
    assert sizes[0] == sizes[1]
    with pytest.raises(ConfigError, match="give the container more memory"):
        TorchEngine(region, Settings(device="cpu"), Timeline.create("engine"))
    region.close()
