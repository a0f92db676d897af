"""LoRA adapters on the torch engine: the tokens of merged weights, in mixed batches, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_fixtures import LLAMA_TARGETS, merge, write_adapter
from engine_fixtures import Answer
from fetching import fetch_into
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.errors import MedusaError, RequestError
from medusa_runtime.kernels.compiled import native_kernels
from medusa_runtime.models.layers.lora import AdapterStep
from medusa_runtime.region.reader import Region

from benchmarks.quantize import quantize

PROMPTS = ("Tokens flow from storage", "A", "to memory, and from memory to layers. " * 4, "日本語 😀🚀")


def fetched(adapter: Path) -> Region:
    region = Region.create()
    fetch_into(region, str(adapter / "adapter_model.safetensors"))
    return region


def ask(served: Any, prompt: str | tuple[int, ...], adapter: str | None, **params: Any) -> Answer:
    served.count += 1
    answer = Answer(f"r{served.count}")
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params})
    served.engine.add(GenerateRequest(answer.id, prompt, given, adapter=adapter), answer.incoming.put)
    return answer


SCORED = {"prompt_logprobs": 0, "max_tokens": 0}


def scores(answer: Answer) -> list[float]:
    found = answer.wait().deltas[0].prompt_logprobs
    assert found is not None
    return list(found.logprobs)


def refusal(served: Any, adapter: Path) -> str:
    served.engine.add_adapter("broken", fetched(adapter))
    with pytest.raises(MedusaError) as caught:
        served.engine.wait_adapter("broken")
    assert ask(served, "A", "broken").last.error == (caught.value.code, str(caught.value))
    assert ask(served, "A", None).last.finish_reason == "length"
    return str(caught.value)


@pytest.fixture
def two(tmp_path: Path, checkpoint: Path) -> dict[str, Path]:
    return {
        "one": write_adapter(tmp_path / "one", checkpoint, seed=1),
        "two": write_adapter(
            tmp_path / "two", checkpoint, seed=2, rank=6, targets=("q_proj", "v_proj", "down_proj"), use_rslora=True
        ),
    }


def test_tokens_are_those_of_merged_weights(
    serve: Callable[..., Any], checkpoint: Path, two: dict[str, Path], tmp_path: Path
) -> None:
    served = serve()
    base = [served.ask(prompt).tokens for prompt in PROMPTS]
    for name, adapter in two.items():
        served.engine.add_adapter(name, fetched(adapter))
        merged = serve(merge(tmp_path / f"{name}-merged", checkpoint, adapter))
        expected = [merged.ask(prompt).tokens for prompt in PROMPTS]
        assert [ask(served, prompt, name).tokens for prompt in PROMPTS] == expected
        scored = [(ask(served, prompt, name, **SCORED), merged.ask(prompt, **SCORED)) for prompt in PROMPTS]
        for found, wanted in scored:
            assert scores(found) == pytest.approx(scores(wanted), abs=1e-3)
        assert expected != base
    assert [served.ask(prompt).tokens for prompt in PROMPTS] == base


@pytest.mark.parametrize("form", ["int8", "gptq-4"])
def test_an_adapter_on_a_quantized_model(
    form: str, serve: Callable[..., Any], checkpoint: Path, two: dict[str, Path], tmp_path: Path
) -> None:
    quantize(checkpoint, tmp_path / "stored", form, dequantized=tmp_path / "floats")
    found = []
    for folder in ("stored", "floats"):
        served = serve(tmp_path / folder, max_concurrency=2)
        served.engine.add_adapter("one", fetched(two["one"]))
        found.append([ask(served, prompt, name).tokens for prompt in PROMPTS[:2] for name in ("one", None)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_batch_of_adapters_and_the_base_is_each_alone(serve: Callable[..., Any], two: dict[str, Path]) -> None:
    served = serve()
    for name, adapter in two.items():
        served.engine.add_adapter(name, fetched(adapter))
    asked = [(prompt, name) for prompt in PROMPTS for name in ("two", None, "one")]
    alone = [ask(served, prompt, name).tokens for prompt, name in asked]
    together = [ask(served, prompt, name) for prompt, name in asked]
    assert [answer.tokens for answer in together] == alone
    assert len({str(tokens) for tokens in alone}) > 6


def test_a_request_waits_for_its_adapter_and_the_base_does_not(
    serve: Callable[..., Any], two: dict[str, Path], tmp_path: Path
) -> None:
    served = serve()
    region = Region.create()
    served.engine.add_adapter("late", region)
    answer, cancelled = ask(served, "A", "late"), ask(served, "A", "late")
    base = served.ask("A").tokens
    assert answer.incoming.empty()
    served.engine.cancel(cancelled.id)
    assert cancelled.last.finish_reason == "cancelled"
    file = str(two["one"] / "adapter_model.safetensors")
    fetch_into(region, file)
    assert len(answer.tokens) == len(base)
    assert answer.tokens != base
    assert served.engine.wait_adapter("late")["layers"] == 28


def test_one_that_is_dropped_serves_those_that_use_it(serve: Callable[..., Any], two: dict[str, Path]) -> None:
    served = serve()
    served.engine.add_adapter("one", fetched(two["one"]))
    expected = ask(served, "A", "one", max_tokens=200).tokens
    answer = ask(served, "A", "one", max_tokens=200)
    answer.next()
    served.engine.drop_adapter("one")
    assert answer.tokens == expected
    with pytest.raises(RequestError, match="expected the name of an adapter"):
        ask(served, "A", "one")
    assert served.engine.stats()["adapters"] == 0


def test_a_file_that_is_written_again_ends_nothing(serve: Callable[..., Any], two: dict[str, Path]) -> None:
    served = serve()
    served.engine.add_adapter("one", fetched(two["one"]))
    expected = ask(served, "A", "one").tokens
    (two["one"] / "adapter_model.safetensors").write_bytes(b"")
    assert ask(served, "A", "one").tokens == expected


def test_patterns_of_ranks_and_scales(
    serve: Callable[..., Any], checkpoint: Path, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    patterns = {"rank_pattern": {"q_proj": 2, "o_proj": 7}, "alpha_pattern": {"q_proj": 9, "down_proj": 3}}
    adapter = write_adapter(tmp_path / "adapter", checkpoint, **patterns)
    served, merged = serve(), serve(merge(tmp_path / "merged", checkpoint, adapter))
    served.engine.add_adapter("patterned", fetched(adapter))
    for prompt in PROMPTS:
        assert ask(served, prompt, "patterned").tokens == merged.ask(prompt).tokens


REFUSED = {
    "another method": ({"peft_type": "IA3"}, 'expected the peft_type LORA, found "IA3"'),
    "DoRA": ({"use_dora": True}, "expected no use_dora (DoRA), found true"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, 'beside the matrices), found ["lm_head"]'),
    "biases": ({"bias": "lora_only"}, 'expected the bias none, found "lora_only"'),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, 'found "pissa_niter_4"'),
    "a rank that the matrices do not have": ({"r": 5}, "down_proj.lora_A.weight: expected [5, 128], found [4, 128]"),
    "a rank that is too large": ({"r": 65}, "expected a rank of at most 64 (--max-lora-rank), found 65"),
    "no rank": ({"r": None}, "r: expected a positive number, found nothing"),
    "an expression": ({"rank_pattern": {"(a+)+": 4}}, 'rank_pattern: expected names of modules, found "(a+)+"'),
    "a target without matrices": ({"target_modules": ["q_proj", "c_attn"]}, "names 'c_attn', and expected matrices"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused(case: str, serve: Any, checkpoint: Path, tmp_path: Path) -> None:
    changes, expected = REFUSED[case]
    served = serve()
    assert expected in refusal(served, write_adapter(tmp_path / "adapter", checkpoint, **changes))


def rewritten(adapter: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    return adapter


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def test_weights_that_do_not_fit_are_refused(serve: Any, checkpoint: Path, tmp_path: Path) -> None:
    import torch

    served = serve()
    changes: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
        "misshaped": (lambda w: w.update({f"{Q}.lora_B.weight": torch.ones(65, 4)}), "expected [64, 4], found [65, 4]"),
        "half": (lambda w: w.pop(f"{Q}.lora_B.weight"), f"expected {Q}.lora_B.weight beside its other matrix"),
        "infinite": (lambda w: w[f"{Q}.lora_A.weight"].fill_(float("inf")), "expected finite numbers"),
        "integers": (lambda w: w.update({f"{Q}.lora_A.weight": w[f"{Q}.lora_A.weight"].int()}), "F16, BF16, found I32"),
        "DoRA": (lambda w: w.update({f"{Q}.lora_magnitude_vector": torch.ones(64)}), "lora_magnitude_vector"),
        "an embedding": (
            lambda w: w.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}),
            "found some for 'lm_head'",
        ),
        "another model": (
            lambda w: w.update({"base_model.model.h.0.c_attn.lora_A.weight": torch.ones(4, 64)}),
            "linear layers of the decoder (down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj), found some "
            "for 'h.0.c_attn'",
        ),
    }
    for case, (change, expected) in changes.items():
        adapter = rewritten(write_adapter(tmp_path / case.replace(" ", "-"), checkpoint), change)
        assert expected in refusal(served, adapter)
    (tmp_path / "half" / "adapter_config.json").unlink()
    assert "expected adapter_config.json beside" in refusal(served, tmp_path / "half")


GATED = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ARCHITECTURES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "OPTForCausalLM": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, ("q_proj", "v_proj", "out_proj", "fc1", "fc2")),
    "FalconForCausalLM": ({}, ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
    "Gemma3ForCausalLM": ({"head_dim": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}, LLAMA_TARGETS),
    "GptOssForCausalLM": (
        {"head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "GemmaForCausalLM": ({"head_dim": 8, "num_key_value_heads": 2}, LLAMA_TARGETS),  # from here on by transformers
    "Phi3ForCausalLM": ({"pad_token_id": 0}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "GPTNeoXForCausalLM": ({}, ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
}


def write_model(folder: Path, architecture: str, **config: Any) -> Path:
    import torch
    import transformers

    kind = getattr(transformers, architecture)
    torch.manual_seed(5)
    shape = {**GATED, "initializer_range": 0.4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1}
    kind(kind.config_class(**{**shape, **config})).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_families_and_transformers_own_modules(architecture: str, serve: Any, tmp_path: Path) -> None:
    config, targets = ARCHITECTURES[architecture]
    base = write_model(tmp_path / "base", architecture, **config)
    adapter = write_adapter(tmp_path / "adapter", base, targets=targets)
    served, merged = serve(base), serve(merge(tmp_path / "merged", base, adapter))
    served.engine.add_adapter("one", fetched(adapter))
    prompts = ([5, 17, 2, 88, 41, 41, 9, 60], [8, 30, 77], [64, 4])
    expected = [merged.ask(prompt).tokens for prompt in prompts]
    plain = [served.ask(prompt).tokens for prompt in prompts]
    answers = [(ask(served, tuple(prompt), "one"), served.ask(prompt)) for prompt in prompts]
    assert [(adapted.tokens, base.tokens) for adapted, base in answers] == list(zip(expected, plain, strict=True))
    assert expected != plain


def test_an_adapter_takes_part_in_layers_that_were_recorded(serve: Any, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "Olmo2ForCausalLM", hidden_size=64, pad_token_id=2)
    adapter = write_adapter(tmp_path / "adapter", base)
    served, merged = serve(base), serve(merge(tmp_path / "merged", base, adapter))
    prompt = (5, 17, 2, 88, 41, 41, 9, 60)
    plain, expected = (ask(engine, prompt, None, max_tokens=24).tokens for engine in (served, merged))
    found = served.engine._model.module.model.layers[0].medusa_programs[0]._found
    if not isinstance(native_kernels(), str):
        assert [type(one).__name__ for (_, rows), one in found.items() if rows == 1] == ["_Recorded"] * 2
    served.engine.add_adapter("one", fetched(adapter))
    assert ask(served, prompt, "one", max_tokens=24).tokens == expected != plain
    assert ask(served, prompt, None, max_tokens=24).tokens == plain


def test_modules_with_an_attention_of_their_own_are_refused(serve: Any, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "BloomForCausalLM", n_layer=2, n_head=4)
    served = serve(base)
    served.engine.add_adapter("one", fetched(write_adapter(tmp_path / "a", base, targets=("query_key_value",))))
    with pytest.raises(RequestError, match="expected a model that runs with the engine's own attention, found Bloom"):
        served.engine.wait_adapter("one")


def test_who_waits_for_a_turn_with_an_adapter_that_proves_unusable_gets_the_error(
    serve: Callable[..., Any], two: dict[str, Path]
) -> None:
    served = serve(max_concurrency=1)
    served.engine.add_adapter("one", fetched(two["one"]))
    served.engine.wait_adapter("one")
    adapters = served.engine._adapters
    group_by_adapter = adapters.group_by_adapter

    def one_row_more(spans: Any) -> Any:
        """As for a module that gives its layers some tokens of a step only."""
        ordered = group_by_adapter(spans)
        adapters._step.tokens += 1
        return ordered

    adapters.group_by_adapter = one_row_more
    for answer in [ask(served, "A", "one") for _ in range(3)]:
        assert answer.last.error is not None, "it was answered by the base model"
    assert ask(served, "A", None).last.finish_reason == "length"


def test_a_layer_that_one_adapter_cannot_change_ends_no_other(serve: Callable[..., Any], two: dict[str, Path]) -> None:
    served = serve()
    for name, folder in two.items():
        served.engine.add_adapter(name, fetched(folder))
        served.engine.wait_adapter(name)
    expected = ask(served, "A", "two").tokens
    layer = served.engine._model.layers[0].self_attn.o_proj
    step = layer.adapted.step

    class SomeRows(AdapterStep):
        """As for a module that gives this layer some tokens of a step only."""

        def __getattribute__(self, name: str) -> Any:
            return -1 if name == "tokens" else getattr(step, name)

    layer.adapted = layer.adapted._replace(step=SomeRows())
    assert ask(served, "A", "two").tokens == expected  # has nothing for this layer
    assert ask(served, "A", "one").last.error is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_low_ranks_are_multiplied_as_torch_does(dtype: str) -> None:
    import torch
    from medusa_runtime.kernels import small_linear

    generator = torch.Generator().manual_seed(0)
    for rank in (1, 3, 4, 6, 16, 33):
        low = torch.randn(5, 3 * rank, generator=generator).to(getattr(torch, dtype))[:, rank : 2 * rank]
        b = torch.randn(70, rank, generator=generator).to(getattr(torch, dtype))
        with torch.inference_mode():
            found = small_linear(low, b)
        assert found.dtype is b.dtype
        torch.testing.assert_close(found.float(), low.float() @ b.float().T, rtol=0.01, atol=0.05)
