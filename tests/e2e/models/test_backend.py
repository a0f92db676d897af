"""What will run a checkpoint: serve, doctor, materialize and inspect say the same, for they ask one place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import medusa_command
import pytest
from fork_server import MEDUSA_MAIN, ForkServer
from medusa_adapters.cli import doctor as doctor_command
from medusa_process import medusa
from plain_environ import plain_environ

OURS = "def handle(request):\n    return 'ok'\n"


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CompletedProcess[str]]:
    """`medusa doctor` without its last check, which takes seconds to import torch in full."""
    monkeypatch.setattr(doctor_command, "_torch", lambda: iter(()))
    return partial(medusa_command.medusa, "doctor", "--port", "0")


def checkpoint(folder: Path, example: Path, **changes: object) -> Path:
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns(".medusa"))
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


REFUSED = {
    "architecture": ({"architectures": ["NoSuchLM"]}, "does not know the architecture NoSuchLM"),
    "typo": ({"architectures": ["LlamaForCasualLM"]}, "LlamaForCasualLM (did you mean LlamaForCausalLM?), and"),
    "newer": ({"architectures": ["Qwen9ForCausalLM"]}, "the architecture Qwen9ForCausalLM, and"),
    "encoder-decoder": (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
        "T5ForConditionalGeneration is an encoder and a decoder",
    ),
    "quantized": ({"quantization_config": {"bits": 4}}, "expected quant_method to be compressed-tensors"),
    "no-list": ({"architectures": "Llama"}, "expected architectures to be a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_commands_refuse_what_serve_refuses(
    name: str,
    tmp_path: Path,
    example: Path,
    quick_doctor: Callable[..., CompletedProcess[str]],
    fork_server: ForkServer,
) -> None:
    changes, words = REFUSED[name]
    model = checkpoint(tmp_path / "model", example, **changes)
    environ = plain_environ()
    serving = ["serve", "--model", str(model), "--host", "127.0.0.1", "--port", "0"]
    serve = fork_server.run(MEDUSA_MAIN, serving, environ=environ)
    assert serve.returncode in (1, 2)
    assert words in serve.stderr
    materialize = fork_server.run(MEDUSA_MAIN, ["materialize", "--model", str(model)], environ=environ)
    assert (materialize.returncode, words in materialize.stderr) == (serve.returncode, True)
    assert not (model / ".medusa").exists()
    doctor = quick_doctor("--model", model, "--engine", "torch")
    assert doctor.returncode == 1
    assert words in next(line for line in doctor.stdout.splitlines() if line.startswith("fail  runs"))
    unchosen = quick_doctor("--model", model)
    level = "fail" if name == "no-list" else "warn"  # vLLM, which is not installed here, may serve the others
    assert words in next(line for line in unchosen.stdout.splitlines() if line.startswith(f"{level}  runs"))
    inspect = medusa_command.medusa("inspect", model)
    assert inspect.returncode == 0  # it shows what is there
    assert words in next(line for line in inspect.stdout.splitlines() if line.startswith("  runs"))


def test_a_module_of_the_handlers_own_needs_no_config(
    tmp_path: Path, example: Path, quick_doctor: Callable[..., CompletedProcess[str]]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(example / "model.safetensors", model)
    (tmp_path / "handler.py").write_text(OURS)
    own = ("--model", model, "--engine", "none", "--handler", f"{tmp_path}/handler.py:handle")
    doctor = quick_doctor(*own)
    assert (doctor.returncode, "the handler's own module" in doctor.stdout) == (0, True), doctor.stdout
    assert medusa("materialize", *own).returncode == 0
    without = quick_doctor("--model", model, "--engine", "none")
    assert (without.returncode, "expected --handler" in without.stdout) == (1, True)
    torch = quick_doctor("--model", model)
    assert (torch.returncode, "say --engine none" in torch.stdout) == (1, True)


def test_deciding_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, medusa_runtime.models.backend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
