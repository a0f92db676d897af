"""What `medusa inspect` and `medusa doctor` say of real checkpoints with something wrong, before any start."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import medusa_command
import pytest
from encoder_checkpoint import write_encoder
from engine_fixtures import checkpoint, write_checkpoint
from medusa_adapters.cli import doctor
from medusa_runtime.config import Settings

from benchmarks.origin import Origin, Variant
from benchmarks.quantize import FORMATS, quantize

__all__ = ["checkpoint"]

DOWN = "model.layers.1.mlp.down_proj"
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture that runs by transformers' code."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 1}
    folder = tmp_path_factory.mktemp("olmo")
    config = transformers.OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2)
    transformers.OlmoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), "mean")


def changed(source: Path, target: Path, change: Callable[[Tensors], object] | None = None, **config: Any) -> Path:
    """A copy of a checkpoint with other tensors, or another config.json."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    if change is not None:
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    if config:
        said = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(said | config))
    return target


def verdicts(model: str | Path, *flags: str) -> tuple[str, str, str]:
    """Return inspect's row ``runs`` for a checkpoint, and the level and the text of doctor's finding."""
    shown = medusa_command.medusa("inspect", model, *flags)
    assert shown.returncode == 0, shown.stderr
    (runs,) = [line.split(maxsplit=1)[1] for line in shown.stdout.splitlines() if line.startswith("  runs ")]
    settings = Settings(model=str(model), engine=flags[1] if flags else "torch")
    findings = {one.name: one for one in doctor._storage(settings, chosen=bool(flags))}
    return runs, findings["runs"].level, findings["runs"].found


def swap(name: str, other: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def replace(name: str, how: Callable[[Any], Any]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: how(tensors[name])})


BROKEN: dict[str, tuple[Callable[[Tensors], object] | None, dict[str, Any], str]] = {
    "missing": (lambda t: t.pop(f"{DOWN}.weight"), {}, "1 missing: layers.1.mlp.down_proj.weight. Does its"),
    "misnamed": (swap(f"{DOWN}.weight", f"{DOWN}.weigth"), {}, f"1 not expected: {DOWN}.weigth."),
    "shape": (replace(f"{DOWN}.weight", lambda t: t[:3]), {}, f"{DOWN}.weight (expected [64, 128], found [3, 128])"),
    "integers": (replace(f"{DOWN}.weight", lambda t: t.char()), {}, f"floats were expected: {DOWN}.weight (I8)"),
    "fewer layers": (None, {"num_hidden_layers": 3}, "9 not expected: model.layers.3."),
    "more layers": (None, {"num_hidden_layers": 5}, "9 missing: layers.4."),
    "vocabulary": (None, {"vocab_size": 321}, "model.embed_tokens.weight (expected [321, 64], found [320, 64])"),
    "no size": (None, {"intermediate_size": None}, "expected intermediate_size to be a positive integer"),
    "sizes of no model": (None, {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 4}, "expected sizes that a model can"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_family_of_the_torch_engine(case: str, checkpoint: Path, tmp_path: Path) -> None:
    change, config, said = BROKEN[case]
    runs, level, found = verdicts(changed(checkpoint, tmp_path / "model", change, **config))
    assert said in runs
    assert (level, runs) == ("fail", f"no: {found}")


def test_what_can_be_served_is_not_refused(checkpoint: Path, olmo: Path, encoder: Path) -> None:
    expected = {
        checkpoint: "the torch engine, as LlamaForCausalLM",
        olmo: "the torch engine, by transformers' OlmoeForCausalLM",
        encoder: "the torch engine, as an encoder",
    }
    for model, text in expected.items():
        assert verdicts(model) == (text, "ok", f"with {text}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), "1 missing: model.layers.1.mlp.experts.3.up_"),
        (replace("model.layers.1.mlp.experts.3.up_proj.weight", lambda t: t[:3]), "(expected [64, 64], found [3, 64])"),
        (lambda t: t.pop("model.norm.weight"), "1 missing: model.norm.weight. Does its config.json belong to it?"),
    ],
    ids=["expert", "shape", "norm"],
)
def test_a_model_of_transformers(change: Callable[[Tensors], object], said: str, olmo: Path, tmp_path: Path) -> None:
    runs, level, _ = verdicts(changed(olmo, tmp_path / "model", change))
    assert said in runs
    assert level == "fail"


def test_an_encoder(encoder: Path, tmp_path: Path) -> None:
    name = "encoder.layer.1.attention.output.dense.weight"
    runs, level, _ = verdicts(changed(encoder, tmp_path / "model", lambda t: t.pop(name)))
    assert f"1 missing: {name}." in runs
    assert level == "fail"


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_without_their_scales(name: str, checkpoint: Path, tmp_path: Path) -> None:
    quantize(checkpoint, tmp_path / "stored", name)
    assert verdicts(tmp_path / "stored")[1] == "ok"

    def without_scales(tensors: Tensors) -> None:
        for part in ("weight_scale", "weight_scale_inv", "scales"):
            tensors.pop(f"{DOWN}.{part}", None)

    runs, level, _ = verdicts(changed(tmp_path / "stored", tmp_path / "model", without_scales))
    assert f"no: {DOWN}: expected the tensors " in runs
    assert level == "fail"


@pytest.mark.parametrize("model", ["checkpoint", "olmo"])
def test_scales_that_config_json_does_not_know_of(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    import torch

    name = "model.layers.1.self_attn.q_proj.weight"

    def scaled(tensors: Tensors) -> None:
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}

    runs, level, _ = verdicts(changed(request.getfixturevalue(model), tmp_path / "model", scaled))
    assert f"1 quantized, where floats were expected: {name} (F8_E4M3)" in runs
    assert level == "fail"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{}", "which it is not: Cannot instantiate"),
        (b"version https://git-lfs.github.com/spec/v1\n", "but found a Git LFS pointer to one; run git lfs pull"),
    ],
)
def test_a_tokenizer_that_cannot_be_read(data: bytes, said: str, checkpoint: Path, tmp_path: Path) -> None:
    model = changed(checkpoint, tmp_path / "model")
    (model / "tokenizer.json").write_bytes(data)
    for flags in ((), ("--engine", "vllm")):
        runs, level, _ = verdicts(model, *flags)
        assert f"no: tokenizer.json: expected the JSON of a fast tokenizer, {said}" in runs
        assert level == "fail"


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_store_is_asked_for_headers_alone(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (large := tmp_path / "large").mkdir()
    write_checkpoint(large, hidden_size=512, intermediate_size=2048)
    bucket = tmp_path / "bucket"
    model = changed(large, bucket / "model", lambda t: t.pop(f"{DOWN}.weight"))
    with Origin(bucket, tmp_path_factory.mktemp("origin"), Variant("plain"), counting=True) as served:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        url = f"{served.url}/model" if scheme == "http" else "s3://model"
        runs, level, _ = verdicts(url)
        sent = served.sent_bytes()
    assert "1 missing: layers.1.mlp.down_proj.weight." in runs
    assert level == "fail"
    assert (model / "model.safetensors").stat().st_size > 50_000_000
    assert sent < 2_000_000  # the beginning of the file and the small files, for inspect and for doctor


def test_a_shard_that_the_index_names_and_is_not_there(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(checkpoint, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-{1 + (name > names[20])}.safetensors" for name in names}
    for shard in sorted(set(places.values())):
        save_file({name: tensors[name] for name in names if places[name] == shard}, model / shard)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert verdicts(model)[1] == "ok"
    whole = (model / "model-2.safetensors").read_bytes()
    (model / "model-2.safetensors").write_bytes(whole[:-4])
    assert "model-2.safetensors" in unreadable(model, "Weights.Corrupt")
    (model / "model-2.safetensors").unlink()
    said = "model.safetensors.index.json names the shard model-2.safetensors, which is missing"
    assert said in unreadable(model, "Storage.NotFound")


def unreadable(model: Path, code: str) -> str:
    """The one line in which both commands say why a checkpoint cannot be read."""
    shown = medusa_command.medusa("inspect", model)
    (line,) = shown.stderr.splitlines()
    (found,) = doctor._storage(Settings(model=str(model)), chosen=False)
    assert (shown.returncode, found.level) == (1, "fail")
    assert line == f"medusa: {found.found}"
    assert line.endswith(f"[{code}]")
    return line


def test_what_only_vllm_serves(checkpoint: Path, tmp_path: Path) -> None:
    """Without an engine that was chosen, it is a warning: `medusa serve` needs --engine vllm."""
    model = changed(checkpoint, tmp_path / "model", quantization_config={"quant_method": "modelopt"})
    runs, level, found = verdicts(model)
    assert runs.startswith("the vllm engine, if it knows LlamaForCausalLM (--engine vllm); not the torch engine: ")
    assert "found 'modelopt'" in runs
    assert (level, found) == ("warn", f"with {runs}")
    runs, level, _ = verdicts(model, "--engine", "torch")
    assert (runs[:4], level) == ("no: ", "fail")
    shown = medusa_command.medusa("inspect", model, "--json", environ={"MEDUSA_ENGINE": "torch"})
    assert set(json.loads(shown.stdout)["backend"]) == {"problem"}
    assert verdicts(model, "--engine", "vllm")[0] == "the vllm engine, if it knows LlamaForCausalLM"


def test_what_no_engine_serves(checkpoint: Path, tmp_path: Path) -> None:
    method = {"quantization_config": {"quant_method": "modelopt"}, "architectures": []}
    runs, level, _ = verdicts(changed(checkpoint, tmp_path / "model", **method))
    assert "no: config.json: expected architectures to be a list of names" in runs
    assert level == "fail"


def test_weights_of_8_bits_without_scales_for_vllm(checkpoint: Path, tmp_path: Path) -> None:
    import torch

    change = replace(f"{DOWN}.weight", lambda t: t.to(torch.float8_e4m3fn))
    model = changed(checkpoint, tmp_path / "model", change, quantization_config={"quant_method": "fp8"})
    runs, level, _ = verdicts(model, "--engine", "vllm")
    assert f"no: {DOWN}: expected the tensors weight, weight_scale, found no weight_scale" in runs
    assert level == "fail"


def test_a_checkpoint_for_a_device(checkpoint: Path, tmp_path: Path) -> None:
    quantize(checkpoint, tmp_path / "stored", "int8")
    shown = medusa_command.medusa("inspect", tmp_path / "stored", "--device", "cuda", "--engine", "torch").stdout
    assert "no: the weights are quantized" in shown
    assert "on CPUs only; expected --device cpu, or --engine vllm [Model.Unsupported]" in shown


def test_a_stranger_s_sizes_take_no_memory(tmp_path: Path) -> None:
    """The mask of each layer would take 4.9 GB."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 320, "hidden_size": 64, "num_layers": 1, "num_heads": 4, "max_position_embeddings": 64}
    config = transformers.GPTNeoConfig(**sizes, attention_types=[[["global"], 1]], bos_token_id=0, eos_token_id=1)
    transformers.GPTNeoForCausalLM(config).save_pretrained(tmp_path / "neo")
    assert verdicts(tmp_path / "neo")[1] == "ok"
    runs, level, _ = verdicts(changed(tmp_path / "neo", tmp_path / "model", max_position_embeddings=70_000))
    assert "no: config.json: expected one that transformers accepts" in runs
    assert level == "fail"
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
