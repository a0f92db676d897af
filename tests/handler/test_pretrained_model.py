"""`context.weights` with models of transformers: the numbers are those of `from_pretrained`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_runtime.errors import ConfigError, MismatchError, ModelError
from medusa_runtime.imports.lazy_torch import TESTED
from pretrained_cases import CASES, WHOLE, computed, weights
from safetensors.torch import load_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    for name, values in CASES.items():
        kind = getattr(transformers, name)
        torch.manual_seed(1)
        model = kind(kind.config_class(**values)).eval()
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.1
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def lean(root: Path) -> str:
    """Have a process that imports leanly compute all cases; return what it logs."""
    command = [sys.executable, "-m", "pretrained_cases", str(root)]
    done = subprocess.run(command, env=_environ(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_any_task_computes_what_transformers_does(root: Path, lean: str, name: str) -> None:
    model = getattr(transformers, name).from_pretrained(root / name).eval()
    found = load_file(root / f"{name}.safetensors")["computed"]
    torch.testing.assert_close(found, computed(name, model), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.__version__.startswith(TESTED), reason="this torch is imported plainly")
def test_most_models_need_neither_all_of_transformers_nor_all_of_torch(lean: str) -> None:
    before, _, behind = lean.partition("so far ")
    assert behind.startswith("_Bare")
    assert before == ""  # nothing was executed or imported as a whole, which the log would say
    assert "configuration CLIPConfig" in behind  # then user code imports transformers itself


@pytest.fixture
def opened(root: Path) -> Iterator[Any]:
    made: list[Any] = []

    def open_weights(name: str) -> Any:
        made.append(weights(root / name))
        return made[-1]

    yield open_weights
    for one in made:
        one.close()


@pytest.mark.parametrize("name", ["ViTForImageClassification", "MarianMTModel", "T5ForConditionalGeneration"])
def test_a_factory_that_makes_a_model_of_transformers_is_filled_as_one(root: Path, opened: Any, name: str) -> None:
    """Whose tensors have other names in the file, or are computed, or tied."""
    kind = getattr(transformers, name)
    config = kind.config_class.from_pretrained(root / name)
    model = opened(name).build(lambda: kind(config).eval())
    torch.testing.assert_close(computed(name, model), computed(name, kind.from_pretrained(root / name).eval()))


def test_another_class_and_type(root: Path, opened: Any) -> None:
    found = opened("BertForTokenClassification").pretrained_model("BertModel", dtype=torch.bfloat16, strict=False)
    assert type(found).__name__ == "BertModel"  # whose pooler the checkpoint lacks
    expected = transformers.BertModel.from_pretrained(root / "BertForTokenClassification", dtype=torch.bfloat16).eval()
    ids = torch.arange(4, 14)[None]
    with torch.inference_mode():
        hidden, wanted = (model(ids).last_hidden_state for model in (found, expected))
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(hidden, wanted)


@pytest.mark.parametrize(
    ("class_name", "message"),
    [
        ("BertForTokenClassificatio", "transformers has no class 'BertForTokenClassificatio'; expected another"),
        ("BertSelfAttention", "expected class_name to be a model of transformers, found 'BertSelfAttention'"),
        ("../x", "transformers has no class '../x'"),
    ],
)
def test_a_class_that_there_is_not(opened: Any, class_name: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"^{message}"):
        opened("BertForMaskedLM").pretrained_model(class_name)


def test_a_head_that_the_checkpoint_lacks_is_an_error(opened: Any) -> None:
    found = opened("BertForMaskedLM")
    found.pretrained_model("BertForQuestionAnswering")
    with pytest.raises(MismatchError, match=r"2 missing: qa_outputs\.weight, qa_outputs\.bias\. .* strict=False"):
        found.wait()


@pytest.mark.parametrize(("name", "most"), [("image_size", 8192), ("num_hidden_layers", 10_000)])
def test_sizes_of_a_part_that_no_model_has(root: Path, tmp_path: Path, name: str, most: int) -> None:
    (tmp_path / "model.safetensors").symlink_to(root / "CLIPModel" / "model.safetensors")
    raw = json.loads((root / "CLIPModel" / "config.json").read_text())
    raw["vision_config"][name] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=f"expected {name} to be at most {most}, found 1000000000"):
        weights(tmp_path).pretrained_model()


def test_a_folder_without_a_configuration(root: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((root / "BertForMaskedLM" / "model.safetensors").read_bytes())
    with pytest.raises(MismatchError, match=r"^expected a config\.json beside the weights"):
        weights(tmp_path).pretrained_model()


assert set(WHOLE) <= set(CASES)
