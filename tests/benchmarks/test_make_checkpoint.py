"""Random checkpoints are what transformers expects, in one file or many, and the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers  # its classes are imported when they are used, which takes seconds
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.make_checkpoint import Blocks, main, size
from benchmarks.shapes import SHAPES, Tensor

TINY = sorted(name for name in SHAPES if name.startswith("tiny-"))


def make(out: Path, *arguments: str, shape: str = "tiny-llama") -> Path:
    assert main(["--shape", shape, "--out", str(out), *arguments]) == 0
    return out


@pytest.mark.parametrize("shape", TINY)
def test_transformers_loads_every_family(shape: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", shape=shape)
    mxfp4 = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if SHAPES[shape].experts else {}
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **mxfp4)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    assert model.dtype == torch.bfloat16
    tokens = transformers.AutoTokenizer.from_pretrained(folder)("The return value", return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(tokens).logits
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert tokens.max() < SHAPES[shape].vocabulary == logits.shape[-1]


@pytest.mark.parametrize("shape", sorted(set(SHAPES) - set(TINY)))
def test_the_large_shapes_have_the_tensors_that_transformers_expects(shape: str) -> None:
    config = SHAPES[shape].config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {}
    for tensor in SHAPES[shape].tensors():
        if tensor.kind == "blocks":
            experts, rows, blocks, size = tensor.shape
            found[tensor.name.removesuffix("_blocks")] = (experts, blocks * size * 2, rows)
        elif tensor.kind != "scales":
            found[tensor.name] = tensor.shape
    assert found == expected


def test_no_two_tokens_of_a_large_vocabulary_are_equally_likely() -> None:
    """Equal rows of the embedding gave equal logits, of which each program chose another one."""
    embedding = Tensor("model.embed_tokens.weight", (8192, 2048))
    values = b"".join(Blocks("bf16", 0).of(embedding, 2))
    row_bytes = len(values) // 8192
    assert len({values[at : at + row_bytes] for at in range(0, len(values), row_bytes)}) == 8192


def test_shards_hold_all_once_and_are_no_larger_than_asked(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    sharded = make(tmp_path / "sharded", "--shard-size", "100KB")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 2
    assert set(index["weight_map"].values()) == {file.name for file in files}
    total_bytes = 0
    with safe_open(whole / "model.safetensors", "pt") as one:
        names = set(one.keys())
        for file in files:
            with safe_open(file, "pt") as part:
                for name in part.keys():  # noqa: SIM118 - not a dict
                    assert index["weight_map"][name] == file.name
                    assert torch.equal(part.get_tensor(name), one.get_tensor(name))
                    total_bytes += part.get_tensor(name).nbytes
                    names.remove(name)
            assert file.stat().st_size < 100_000 + 10_000  # the header comes on top
    assert not names
    assert index["metadata"]["total_size"] == total_bytes
    model = transformers.AutoModelForCausalLM.from_pretrained(sharded)
    assert torch.equal(model.lm_head.weight, transformers.AutoModelForCausalLM.from_pretrained(whole).lm_head.weight)


def test_the_seed_decides(tmp_path: Path) -> None:
    first, again, other = (
        (make(tmp_path / name, "--seed", seed) / "model.safetensors").read_bytes()
        for name, seed in (("first", "1"), ("again", "1"), ("other", "2"))
    )
    assert first == again
    assert first != other


def test_layers_differ_and_are_scaled(tmp_path: Path) -> None:
    with safe_open(make(tmp_path / "model", "--dtype", "fp32") / "model.safetensors", "pt") as file:
        layers = [file.get_tensor(f"model.layers.{layer}.mlp.up_proj.weight") for layer in (0, 1)]
        assert file.get_tensor("model.norm.weight").eq(1).all()
    assert layers[0].dtype == torch.float32
    assert not torch.equal(*layers)
    assert abs(layers[0].std().item() - 0.02) < 0.001


@pytest.mark.parametrize("vocabulary", ["tiny-llama", "llama-57m"])
def test_the_tokenizer_covers_the_vocabulary(vocabulary: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make(tmp_path / "model", shape=vocabulary) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SHAPES[vocabulary].vocabulary
    assert tokenizer.decode(tokenizer.encode("Return the value.").ids) == "Return the value."


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--shape", "tiny-llama", "--out", str(tmp_path)], "new or empty folder"),
        (["--shape", "gpt-5", "--out", str(tmp_path / "new")], "llama-57m"),
        (["--shape", "tiny-llama", "--out", str(tmp_path / "new"), "--shard-size", "2XB"], "500MB or 2GB"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    assert size("1.5KB") == 1500
