"""Architectures without a family of ours: the same greedy tokens as transformers' own ``generate``, from its files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import SETTINGS, Served
from medusa_runtime.engine.torch import prompt_scoring
from medusa_runtime.errors import EngineError
from medusa_runtime.models.layers.whole import WholeAttention
from medusa_runtime.models.transformers.attention import STEP, Step, attend
from recurrent_models import OTHERS, write_recurrent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

PROMPTS = ([5, 17, 2, 88, 41, 41, 9, 60, 3, 71, 12, 33, 90, 7, 54, 29], [8, 30, 77], [64, 4, 21, 9, 80, 15, 3])
TOKENS = 10
SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
GATED = SHAPE | {"intermediate_size": 48, "max_position_embeddings": 64, "num_key_value_heads": 2}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
PLAIN = SHAPE | {"intermediate_size": 48, "max_position_embeddings": 64}
LATENT = GATED | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHead", GPT),
    "gemma": ("GemmaForCausalLM", GATED | {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", GATED | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "phi": ("PhiForCausalLM", PLAIN),
    "phi3": ("Phi3ForCausalLM", GATED | {"sliding_window": 6}),
    "gpt-neox": ("GPTNeoXForCausalLM", PLAIN),
    "olmo": ("OlmoForCausalLM", GATED),
    "olmo2": ("Olmo2ForCausalLM", GATED),
    "olmoe": ("OlmoeForCausalLM", GATED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("GraniteForCausalLM", GATED | {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "starcoder2": ("Starcoder2ForCausalLM", GATED | {"sliding_window": 6}),
    "deepseek-v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek-v3": ("DeepseekV3ForCausalLM", LATENT),
    "falcon-alibi": ("FalconForCausalLM", SHAPE | {"alibi": True}),
    "bloom": ("BloomForCausalLM", {"vocab_size": 97, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mpt": ("MptForCausalLM", {"vocab_size": 97, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}),
    "stablelm": ("StableLmForCausalLM", GATED),
    "cohere": ("CohereForCausalLM", GATED),
    "cohere2": ("Cohere2ForCausalLM", GATED | {"sliding_window": 6}),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "gpt-neo": ("GPTNeoForCausalLM", {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                                      "attention_types": [[["global", "local"], 1]], "window_size": 6,
                                      "max_position_embeddings": 64}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", GPT),
    "codegen": ("CodeGenForCausalLM", GPT | {"rotary_dim": 4}),
    "glm": ("GlmForCausalLM", GATED | {"head_dim": 8, "pad_token_id": 0}),
    "glm4": ("Glm4ForCausalLM", GATED | {"head_dim": 8, "pad_token_id": 0}),
    "nemotron": ("NemotronForCausalLM", GATED),
    "smollm3": ("SmolLM3ForCausalLM", GATED | {"pad_token_id": 0}),
    "exaone4": ("Exaone4ForCausalLM", GATED | {"sliding_window": 6}),
    "ernie4.5": ("Ernie4_5ForCausalLM", GATED),
    "helium": ("HeliumForCausalLM", GATED | {"head_dim": 8}),
    "persimmon": ("PersimmonForCausalLM", PLAIN),
    "xglm": ("XGLMForCausalLM", {"vocab_size": 97, "d_model": 32, "ffn_dim": 48, "num_layers": 2,
                                 "attention_heads": 4, "max_position_embeddings": 64}),
    "biogpt": ("BioGptForCausalLM", PLAIN),
    "phimoe": ("PhimoeForCausalLM", GATED | {"num_local_experts": 4}),
    "phimoe-window": ("PhimoeForCausalLM", GATED | {"num_local_experts": 4, "sliding_window": 6}),
    "llama4-chunks": (
        "Llama4ForCausalLM",
        GATED | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 6,
                 "interleave_moe_layer_step": 2},
    ),
    "arcee": ("ArceeForCausalLM", GATED),
    "ernie4.5-moe": (
        "Ernie4_5_MoeForCausalLM", GATED | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        GATED | {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                 "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "granitemoe": ("GraniteMoeForCausalLM", GATED | {"num_local_experts": 4}),
}  # fmt: skip


def write(case: str, folder: Path, **changes: Any) -> Any:
    """A random model of transformers, saved to ``folder``."""
    name, values = CASES[case]
    kind = getattr(transformers, name + ("Model" if name.endswith("LMHead") else ""))
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = kind.config_class(**tokens | values | changes)
    torch.manual_seed(len(case))
    capped = {"attn_implementation": "eager"} if case == "gemma2" else {}  # its sdpa leaves out that scores are bounded
    model = kind._from_config(config, **capped).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name or "ln_" in name else 0.0))
    model.save_pretrained(folder)
    return model


def expected(model: Any, prompt: list[int], count: int = TOKENS) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


# A mask by position, a bound, fused experts, attention of its own, and a window that only a mask shows.
QUICK = ("gpt2", "gemma2", "olmoe", "bloom", "phimoe-window")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path, serve: Callable[..., Served]) -> None:
    model = write(case, tmp_path)
    served = serve(tmp_path, max_batched_tokens=max(12, SETTINGS.max_concurrency))  # prompts come in chunks
    answers = [served.ask(prompt, max_tokens=TOKENS, logit_bias={2: -100.0}) for prompt in PROMPTS]
    assert [answer.tokens for answer in answers] == [expected(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("case", QUICK)
def test_prompts_are_scored_as_by_transformers_in_small_steps(
    case: str, tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scoring, "_MOST_LOGITS", 97 * 5)
    model = write(case, tmp_path)
    served = serve(tmp_path)
    rows: list[int] = []
    run = served.engine._model.run
    monkeypatch.setattr(
        served.engine._model, "run", lambda *step: rows.append(0 if step[3] is None else len(step[3])) or run(*step)
    )
    company = served.ask(PROMPTS[0], max_tokens=12)
    prompts = (*PROMPTS, [7])
    answers = [served.ask(prompt, prompt_logprobs=2, max_tokens=3) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            reference = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].float(), -1)
        found = list(answer.wait().deltas[0].prompt_logprobs.tokens())
        assert [token.token_id for token in found] == list(prompt)
        for token, row in zip(found[1:], reference, strict=True):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-3)
            assert [value for _, _, value in token.top] == pytest.approx(row.topk(2)[0].tolist(), abs=1e-3)
        assert answer.tokens == served.ask(prompt, max_tokens=3).tokens
    assert company.last.finish_reason == "length"
    assert max(rows) <= 5 + len(prompts) + 1  # of the tokens that are scored, and the last ones


def test_attention_that_the_cache_has_no_room_for_is_refused() -> None:
    module, step = torch.nn.Module(), Step()
    step.kv_heads, step.head_dim = 2, 8
    setattr(module, STEP, step)
    step.begin(WholeAttention())
    module.layer_idx = 0
    key, narrow, wide = (torch.randn(1, 2, 3, size) for size in (8, 6, 12))
    assert attend(module, key, key, narrow)[0].shape == (1, 3, 2, 6)
    with pytest.raises(
        EngineError, match=r"keys of \[1, 2, 3, 8\], values of \[1, 2, 3, 12\]\); expected --engine vllm"
    ):
        attend(module, key, key, wide)
    bias = torch.zeros(1, 2, 3, 3)
    with pytest.raises(EngineError, match=r"values of \[1, 2, 3, 6\], position_bias\)"):
        attend(module, key, key, narrow, position_bias=bias, position_ids=torch.arange(3))


LEANLY = """
import queue, sys, threading
from pathlib import Path
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.engine.preimport import preimport
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

settings, timeline = Settings(kv_cache_mb=4, device="cpu"), Timeline.create("engine")
preimport(settings)
from medusa_runtime.engine.torch.engine import TorchEngine
from medusa_runtime.imports.lazy_torch import is_lean
for folder in sys.argv[1:]:
    region = Region.create()
    prefetch(region, folder, settings=settings, timeline=timeline)
    engine, stop, deltas = TorchEngine(region, settings, timeline), threading.Event(), queue.SimpleQueue()
    thread = threading.Thread(target=engine.run, args=(stop,))
    thread.start()
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logit_bias={2: -100.0})
    engine.add(GenerateRequest("r", (8, 30, 77), params), deltas.put)
    tokens = []
    while True:
        delta = deltas.get(timeout=60)
        tokens += delta.token_ids
        if delta.finish_reason:
            break
    print(tokens)
    stop.set()
    thread.join()
    engine.close()
unused = ("torch._inductor", "transformers.generation.utils", "scipy")
print([name for name in unused if name in sys.modules], is_lean())
"""


def test_the_lean_import_gives_the_same_tokens(tmp_path: Path) -> None:
    cases = ("gpt2", "gemma", "olmoe")
    found = [expected(write(case, tmp_path / case), PROMPTS[1]) for case in cases]
    command = [sys.executable, "-c", LEANLY, *(str(tmp_path / case) for case in cases)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == [*map(str, found), "[] True"], out.stderr


def test_the_lean_import_runs_layers_that_keep_states(tmp_path: Path) -> None:
    """Ours, and those of which transformers' own functions need parts of torch."""
    folders = [write_recurrent(tmp_path / name, name) for name in OTHERS]
    load = transformers.AutoModelForCausalLM.from_pretrained
    found = [expected(load(folder, dtype=torch.float32), PROMPTS[1]) for folder in folders]
    command = [sys.executable, "-c", LEANLY, *map(str, folders)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[:-1] == [*map(str, found)], out.stderr
