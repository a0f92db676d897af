"""Models from GGUF files against transformers, from the checkpoint that was converted: the same logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import Served, fill_region
from gguf_files import dequantize, write_gguf
from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.engine.checkpoint_files import read_config
from medusa_runtime.load.loader import Loader
from medusa_runtime.load.quantized import block_codes
from medusa_runtime.models import DecoderModel
from reference_models import FOREIGN, PROMPT, logits, reference

pytest.importorskip("transformers")

CASES = (
    "llama-untied", "llama-tied", "llama-mha-biases", "llama-linear", "llama-llama3", "llama-yarn", "mistral-window",
    "mixtral", "mixtral-window", "qwen2", "qwen2-moe", "qwen3", "qwen3-moe",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _plainly() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def loaded_logits(file: Path, dtype: torch.dtype | None = None) -> torch.Tensor:
    region = fill_region(file)
    try:
        config = read_config(region.file, region.wait_index())
        model: DecoderModel = config.model()
        with Loader(region, model.applier(dtype or config.dtype)) as loader:
            loader.wait()
        return logits(model, PROMPT)
    finally:
        region.close()


@pytest.mark.parametrize("case", CASES)
def test_agrees_in_fp32(case: str, tmp_path: Path) -> None:
    theirs = reference(case, tmp_path, torch.float32)
    expected = theirs(torch.tensor([PROMPT])).logits[0]
    found = loaded_logits(write_gguf(tmp_path, tmp_path / "m.gguf"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pattern", [3, [True, True, False]])
def test_gemma_says_which_layers_have_a_window(pattern: int | list[bool], tmp_path: Path) -> None:
    theirs = reference("gemma3-head-scale", tmp_path, torch.float32)
    expected = theirs(torch.tensor([PROMPT])).logits[0]
    file = write_gguf(tmp_path, tmp_path / "m.gguf", gemma3__attention__sliding_window_pattern=pattern)
    torch.testing.assert_close(loaded_logits(file), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("case", "options"), [("llama-llama3", {"parts": 3}), ("mixtral", {"merged": False})])
def test_split_files_and_experts_with_tensors_of_their_own(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    theirs = reference(case, tmp_path, torch.float32)
    expected = theirs(torch.tensor([PROMPT])).logits[0]
    found = loaded_logits(write_gguf(tmp_path, tmp_path / "m.gguf", **options))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", FOREIGN)
def test_models_of_transformers_write_the_same_tokens(
    case: str, tmp_path: Path, serve_region: Callable[..., Served]
) -> None:
    theirs = reference(case, tmp_path, torch.float32)
    if case == "gemma2":
        theirs.set_attn_implementation("eager")  # its sdpa leaves out that scores are bounded
    prompt = PROMPT * 2  # longer than the original length of longrope, which has other factors from there on
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    served = serve_region(fill_region(write_gguf(tmp_path, tmp_path / "m.gguf")))
    assert served.ask(prompt, max_tokens=8).tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_the_floats_that_they_stand_for(
    kind: str, kernels: str, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setattr(block_codes, "native_kernels", lambda: "no compiled kernel")
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    file = write_gguf(make_checkpoint(tmp_path, **wide), tmp_path / "m.gguf", kind)
    floats = dequantize(file, tmp_path / "floats.gguf")
    found, expected = (loaded_logits(one, torch.float32) for one in (file, floats))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))
