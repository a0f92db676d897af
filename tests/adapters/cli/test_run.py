"""`medusa run`: a handler called once, also where Linux' own calls are not there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fork_server import MEDUSA_MAIN, ForkServer

Medusa = Callable[..., subprocess.CompletedProcess[str]]

HANDLER = """
class Handler:
    def load(self, context):
        self.greeting = "hello"

    def predict(self, request):
        return {self.greeting: request.json["name"]}

def stream(request):
    yield "a"
    yield {"b": 1}

async def later(request):
    return ("no", 404)

def model(request, context):
    return context.model.generate("x")

def broken(request):
    raise ValueError("ouch")

def unsendable(request):
    return {"tags": {1, 2}}
"""

NET = """
import torch

class Handler:
    def load(self, context):
        self.net = context.weights.build(lambda: torch.nn.Linear(2, 1))

    def predict(self, request):
        with torch.inference_mode():
            return self.net(torch.ones(1, 2)).tolist()
"""

# A machine that is no Linux: its name, and without what only Linux has.
MACOS = """
import ctypes, os, pathlib, signal, socket, sys
sys.platform = "darwin"
LINUX = {
    os: ("memfd_create", "sched_getaffinity", "sched_setaffinity", "pipe2", "eventfd", "posix_fadvise"),
    signal: ("sigtimedwait", "sigwaitinfo"),
    socket: ("SOCK_CLOEXEC",),
}
for module, names in LINUX.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in [name for name in dir(os) if name.startswith("MFD_")]:
    delattr(os, name)
def none(*_):
    raise OSError("no prctl here")
ctypes.CDLL = none
opened = open
def no_proc(path, *rest, **more):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(path)
    return opened(path, *rest, **more)
import builtins, io
builtins.open = io.open = no_proc
from medusa_adapters.cli.main import main
sys.argv = ["medusa", *sys.argv[1:]]
sys.exit(main())
"""


@pytest.fixture
def handler(tmp_path: Path) -> Path:
    (tmp_path / "handler.py").write_text(HANDLER)
    return tmp_path


@pytest.fixture
def medusa(fork_server: ForkServer) -> Medusa:
    def run(folder: Path, *arguments: str, macos: bool = False) -> subprocess.CompletedProcess[str]:
        if not macos:
            return fork_server.run(MEDUSA_MAIN, arguments, folder=folder)
        command = [sys.executable, "-c", MACOS, *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)

    return run


@pytest.mark.parametrize("macos", [False, True])
def test_a_handler_is_called_once(handler: Path, macos: bool, medusa: Medusa) -> None:
    done = medusa(handler, "run", "handler.py", "--request", '{"name": "Ada"}', macos=macos)
    assert (done.returncode, done.stdout) == (0, '{"hello": "Ada"}\n'), done.stderr
    done = medusa(handler, "run", "handler:stream", macos=macos)
    assert (done.returncode, done.stdout) == (0, 'a\n{"b": 1}\n'), done.stderr
    done = medusa(handler, "run", "--handler", "handler:later", macos=macos)
    assert (done.returncode, done.stdout, done.stderr) == (1, "no\n", "status 404\n")


def test_a_request_from_stdin(handler: Path) -> None:
    command = [sys.executable, "-m", "medusa_adapters", "run", "handler.py", "--request", "@-"]
    done = subprocess.run(
        command, cwd=handler, input='{"name": "Ada"}', capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (0, '{"hello": "Ada"}\n'), done.stderr


def test_what_a_handler_gets_wrong(handler: Path, medusa: Medusa) -> None:
    done = medusa(handler, "run", "handler.py", "--request", "no json")
    assert (done.returncode, done.stderr.startswith("status 400: expected a JSON body")) == (1, True)
    done = medusa(handler, "run", "handler:broken")
    assert done.returncode == 1
    assert 'raise ValueError("ouch")' in done.stderr
    assert "medusa_handler" not in done.stderr
    assert "handler:broken: answering raised ValueError: ouch [Handler.Failed]" in done.stderr
    assert "--model URL" in medusa(handler, "run", "handler:model").stderr
    done = medusa(handler, "run", "handler.py", "--request", "@nothing")
    assert (done.returncode, "expected a file that can be read" in done.stderr) == (2, True)
    assert medusa(handler, "run").returncode == 2
    done = medusa(handler, "run", "handler:unsendable")
    assert done.returncode == 1
    assert done.stderr.startswith("medusa: handler:unsendable: answering raised TypeError: the function returned a ")
    assert "expected dict, list, str" in done.stderr


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("notes.txt", "notes.txt: expected a Python file, whose name ends in .py [Handler.NotFound]"),
        ("./notes.txt", "notes.txt: expected a Python file, whose name ends in .py [Handler.NotFound]"),
        ("hander", "there is no module hander and no file"),
        ("handler.handle", "there is no module handler.handle and no file"),
    ],
)
def test_a_handler_that_is_not_there(handler: Path, spec: str, expected: str, medusa: Medusa) -> None:
    (handler / "notes.txt").touch()
    done = medusa(handler, "run", spec)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert expected in done.stderr


def test_code_that_does_not_import_is_shown_from_its_own_first_line(handler: Path, medusa: Medusa) -> None:
    (handler / "broken.py").write_text("import nope_nope\n")
    for spec in ("broken.py", "broken"):
        lines = medusa(handler, "run", spec).stderr.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert "broken.py" in lines[1]
        assert lines[-1].endswith("[Handler.NotFound]")


def test_a_handler_is_called_once_with_a_model(handler: Path, medusa: Medusa) -> None:
    model = str(Path(__file__).parents[3] / "examples" / "pydoc-lm")
    done = medusa(handler, "run", "handler:model", "--model", model)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    done = medusa(handler, "run", "handler:broken", "--model", model)
    assert (done.returncode, "status 500" in done.stderr, 'raise ValueError("ouch")' in done.stderr) == (1, True, True)
    done = medusa(handler, "run", "handler:model", "--model", "nothing-here")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing-here: expected a folder with a checkpoint" in done.stderr


def test_an_instance_that_cannot_start_says_why(handler: Path, medusa: Medusa) -> None:
    """A module's weights without ``--engine none``, and a wrong file: the instance's line, and nothing around it."""
    (handler / "net.py").write_text(NET)
    torch.save({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, handler / "net.pt")
    (handler / "slow.py").write_text("import time\ndef handle(request):\n    return 1\ntime.sleep(20)\n")
    done = medusa(handler, "run", "slow.py", "--model", "net.pt")  # slow, so that the engine's end comes first
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("medusa: expected a config.json beside the weights")
    assert "--engine none [Weights.Mismatch]" in done.stderr
    assert "did not answer" not in done.stderr
    done = medusa(handler, "run", "net.py", "--model", "net.pt", "--engine", "none")
    assert (done.returncode, done.stdout) == (0, "[[3.0]]\n"), done.stderr
    done = medusa(handler, "run", "net.py", "--model", "nothing.pt", "--engine", "none")
    assert done.stderr.splitlines()[-1].endswith("nothing.pt: no such file [Storage.NotFound]")
    assert "did not answer" not in done.stderr


@pytest.mark.parametrize("command", ["serve", "doctor", "materialize", "bench", "node", "fetch"])
def test_elsewhere_than_on_linux_one_line_says_what_works(tmp_path: Path, command: str, medusa: Medusa) -> None:
    done = medusa(tmp_path, command, macos=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"medusa {command} needs Linux, found macOS" in line
    assert "medusa run handler.py" in line


INFERENCE = """
import json

def model_fn(model_dir):
    return {"from": model_dir}

def input_fn(body, content_type):
    return json.loads(body)

def predict_fn(data, model):
    return [data, model["from"]]

def output_fn(prediction, accept):
    return json.dumps(prediction)
"""


def test_the_documented_handler_calls_sagemakers_functions(tmp_path: Path, medusa: Medusa) -> None:
    text = (Path(__file__).parents[3] / "docs" / "migrate.md").read_text()
    (tmp_path / "handler.py").write_text(text.split("```python\n")[1].split("```")[0])
    (tmp_path / "inference.py").write_text(INFERENCE)
    done = medusa(tmp_path, "run", "handler.py", "--request", "[1]")
    assert (done.returncode, done.stdout.strip()) == (0, '[[1], "/opt/ml/model"]'), done.stderr
    done = medusa(tmp_path, "run", "inference.py", "--request", "[1]")
    assert "docs/migrate.md shows a handler that calls SageMaker's model_fn" in done.stderr


@pytest.mark.parametrize(("attribute", "hint"), [("context.weights.build", True), ("self.net", False)])
def test_a_missing_model_is_named_where_loading_needs_one(
    tmp_path: Path, medusa: Medusa, attribute: str, hint: bool
) -> None:
    code = f"class Handler:\n  def load(self, context):\n    {attribute}(str)\n  def predict(self, request): ...\n"
    (tmp_path / "handler.py").write_text(code)
    done = medusa(tmp_path, "run", "handler.py")
    assert done.returncode == 1
    assert ("without --model, context.weights and context.model are None" in done.stderr) is hint
