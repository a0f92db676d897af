"""Models whose layers keep a state of each sequence: transformers' tokens, however steps are cut and shared."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_fixtures import SETTINGS, Served, join_tokenizers
from medusa_runtime.engine.checkpoint_files import check_for_gpu
from medusa_runtime.errors import ConfigError, ModelError
from medusa_runtime.kernels import recurrence
from medusa_runtime.models import model_config
from medusa_runtime.models.transformers import recurrent
from recurrent_models import OTHERS, OWN, PICTURES, SHAPES, write_recurrent, write_with_pictures

from benchmarks.quantize import quantize

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

TOKENS = 12
PROMPTS = [list(range(5, 60)), [8], [41] * 20, [30, 77, 5]]


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recurrent(tmp_path_factory.mktemp("recurrent"), request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The tokens that transformers generates in float32, of each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    return found


def answers(served: Served, prompts: list[list[int]]) -> list[list[int]]:
    asked = [served.ask(prompt, max_tokens=TOKENS, logit_bias={2: -100.0}) for prompt in prompts]
    return [answer.tokens for answer in asked]


def test_tokens_are_those_of_transformers(
    folder: Path, expected: list[list[int]], serve: Callable[..., Served]
) -> None:
    """Prompts come in chunks, and beside decodes; a second time, when nothing may be left of the first."""
    served = serve(folder, max_batched_tokens=max(12, SETTINGS.max_concurrency))
    assert answers(served, PROMPTS) == expected
    assert answers(served, PROMPTS[::-1]) == expected[::-1]
    assert served.engine.stats()["cached_tokens_total"] == 0


@pytest.mark.parametrize("apart", [False, True])
def test_chunks_give_the_log_probabilities_of_the_whole_prompt(
    folder: Path, apart: bool, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that were lost between two chunks would show here, where it hardly changes the most likely token."""
    if apart:  # the way of layers whose functions are unknown
        monkeypatch.setattr(recurrent, "_with_our_functions", lambda kind: None)
    served = serve(folder, max_batched_tokens=9)
    asked = [served.ask(prompt, prompt_logprobs=0, max_tokens=2) for prompt in (PROMPTS[2], PROMPTS[0])]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, answer in zip((PROMPTS[2], PROMPTS[0]), asked, strict=True):
        scores = answer.wait().deltas[0].prompt_logprobs
        assert scores is not None
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, :-1]
        rows = torch.log_softmax(logits, -1)
        expected = [float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)]
        assert [one.logprob for one in list(scores.tokens())[1:]] == pytest.approx(expected, abs=2e-3)


def test_without_compiled_kernels(
    folder: Path, expected: list[list[int]], serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, "native_kernels_for", lambda *tensors: None)
    assert answers(serve(folder, max_batched_tokens=12, max_concurrency=4), PROMPTS) == expected


@pytest.mark.parametrize("architecture", OTHERS)
def test_layers_whose_functions_are_unknown_run_for_each_sequence(
    architecture: str, tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the other test that run for all sequences at once give the same tokens in this way, too."""
    folder = write_recurrent(tmp_path, architecture)
    expected = answers(serve(folder, max_batched_tokens=12), PROMPTS)
    monkeypatch.setattr(recurrent, "_with_our_functions", lambda kind: None)
    assert answers(serve(folder, max_batched_tokens=12), PROMPTS) == expected


@pytest.mark.parametrize(
    ("architecture", "sizes", "message"),
    [
        (
            "Mamba2ForCausalLM",
            {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
            "found no layer that attends",
        ),
        ("Zamba2ForCausalLM", {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1}, "that share them"),
        ("RecurrentGemmaForCausalLM", {}, "keeps a recurrent state, for which the torch engine has no cache"),
        ("MiniMaxForCausalLM", {}, "keeps a recurrent state, for which the torch engine has no cache"),
        ("InklingForCausalLM", {"num_key_value_heads": 2}, "it uses get_mask_sizes, get_query_offset of its cache"),
        ("Inkling2ForCausalLM", {"num_key_value_heads": 2}, "several parts of a layer do"),
    ],
)
def test_other_states_are_refused(architecture: str, sizes: dict[str, object], message: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4} | sizes
    getattr(transformers, architecture).config_class(**sizes).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [architecture]}
    with pytest.raises(ModelError, match=message):
        model_config(raw).model()


def test_preempted_sequences_begin_again(folder: Path, expected: list[list[int]], serve: Callable[..., Served]) -> None:
    served = serve(folder, max_model_len=80, kv_cache_mb=None, max_concurrency=4)
    blocks = served.engine._cache.blocks
    blocks.limit(6)  # the first sequence needs a fifth block while the second one has two
    all_asked = threading.Event()
    served.engine._inbox.post(all_asked.wait)
    asked = [served.ask(prompt, max_tokens=TOKENS, logit_bias={2: -100.0}) for prompt in (PROMPTS[0], PROMPTS[2])]
    all_asked.set()
    assert [answer.tokens for answer in asked] == [expected[0], expected[2]]
    assert served.engine.stats()["preemptions_total"]
    assert blocks.used == served.engine._cache.states.slots.used == 0


def test_an_ended_request_leaves_its_state_to_others(
    folder: Path, expected: list[list[int]], serve: Callable[..., Served]
) -> None:
    served = serve(folder, max_concurrency=2)
    endless = served.ask(PROMPTS[2], max_tokens=200, ignore_eos=True)
    endless.next()
    served.engine.cancel(endless.id)
    assert answers(served, PROMPTS) == expected
    assert served.engine._cache.states.slots.used == 0


def test_weights_may_be_quantized(folder: Path, tmp_path: Path, serve: Callable[..., Served]) -> None:
    stored, floats = tmp_path / "stored", tmp_path / "floats"
    quantize(folder, stored, "fp8-blocks", dequantized=floats)
    found = [answers(serve(each, max_concurrency=2), PROMPTS[1:]) for each in (stored, floats)]
    assert found[0] == found[1]


def test_memory_limits_how_many_run_at_a_time(
    folder: Path, expected: list[list[int]], serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """States get half of what is free beside the weights."""
    config = model_config(json.loads((folder / "config.json").read_text()))
    state_bytes = config.model().config.state_bytes(torch.float32)
    concurrency = (64 << 20) // state_bytes  # whose states take 64 MiB
    served = serve(folder, memory_limit_mb=32, max_concurrency=concurrency, kv_cache_mb=1)
    count = served.engine._cache.states.slots.blocks
    assert 2 < count <= (16 << 20) // state_bytes
    assert f"memory has room for the states of {count} sequences, so {count} requests run at a time" in caplog.text
    assert answers(served, PROMPTS) == expected


def test_states_that_fit_nowhere_are_an_error(tmp_path: Path, serve: Callable[..., Served]) -> None:
    """A hostile config.json; the checkpoint's shapes would be looked at later."""
    config = raw("Qwen3_5ForCausalLM", tmp_path, linear_key_head_dim=1 << 22, linear_value_head_dim=1 << 22)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"the states of one sequence take \d+ MiB: expected as much free memory"):
        serve(tmp_path)
    join_tokenizers()


@pytest.mark.parametrize("architecture", PICTURES)
def test_the_text_part_of_a_model_that_takes_pictures(
    architecture: str, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    model = write_with_pictures(tmp_path, architecture)
    ids = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    assert answers(serve(tmp_path, max_batched_tokens=12), PROMPTS[:1]) == [expected]


@pytest.mark.parametrize("architecture", OWN)
def test_a_gpu_is_not_for_them(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="keep a state of each sequence, which the torch engine runs on CPUs only"):
        check_for_gpu(model_config(raw(architecture, tmp_path)))


def raw(architecture: str, tmp_path: Path, **changes: object) -> dict[str, object]:
    """A config.json as transformers writes it, changed."""
    folder = write_recurrent(tmp_path, architecture)
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in (found | changes).items() if value != "absent"}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 4}, "with at least one full_attention"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "layer_types to be 4 times"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "mamba", "conv", "full_attention"]}, "full_attention or conv"),
        ("Lfm2ForCausalLM", {"layer_types": "absent", "full_attn_idxs": [1, "2"]}, "a list of layers' numbers"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 1}, "conv_L_cache to be 2 to 16"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 99}, "conv_L_cache to be at most 16"),
        ("Lfm2MoeForCausalLM", {"num_experts_per_tok": 9}, "at most the number of experts, 8"),
        ("Qwen3_5ForCausalLM", {"linear_num_key_heads": 3}, "a divisor of the 4 heads of values"),
        ("Qwen3_5ForCausalLM", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim to be 2 to 16"),
        ("Qwen3_5ForCausalLM", {"linear_value_head_dim": 0}, "linear_value_head_dim to be a positive integer"),
        ("Qwen3_5ForCausalLM", {"rope_parameters": [1]}, "rope_parameters to be an object"),
        ("Qwen3_5ForCausalLM", {"rope_parameters": {"partial_rotary_factor": 2}}, "at most 1"),
        ("Qwen3_5ForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.001}}, "head_dim"),
        ("Qwen3NextForCausalLM", {"full_attention_interval": 0, "layer_types": "absent"}, "full_attention_interval"),
        ("Qwen3NextForCausalLM", {"full_attention_interval": 9, "layer_types": "absent"}, "at least one"),
    ],
)
def test_wrong_values_are_named(architecture: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(raw(architecture, tmp_path, **changes))


@pytest.mark.parametrize("architecture", OWN)
def test_absent_keys_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """A small config.json, as on the Hub, is read like one that has all keys."""
    kind = getattr(transformers, architecture).config_class
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96}
    small = {"architectures": [architecture], "model_type": kind.model_type, "eos_token_id": 2, "dtype": "float32"}
    if "Moe" in architecture or "Next" in architecture:
        small |= {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 4}
        small |= {} if architecture.startswith("Lfm2") else {"shared_expert_intermediate_size": 48}
    small |= sizes | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": SHAPES[architecture].get("layer_types"),
    }
    kind(**{key: value for key, value in small.items() if key != "architectures"}).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    assert model_config(small) == model_config(whole | {"architectures": [architecture]})
