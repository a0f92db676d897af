"""`medusa serve` continues from what `medusa snapshot` has saved, and is then like any other instance."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.bench.coldstart.resumed import continues
from medusa_process import MEDUSA, medusa
from medusa_runtime.device.choice import installed_cuda
from medusa_snapshot.resuming import MEMORY, place
from plain_environ import plain_environ

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no snapshots here")

# Nothing of a torch that is built for GPUs is lazy in a snapshot.
_PLAIN = pytest.param(
    ("--torch-import", "plain"), marks=pytest.mark.skipif(installed_cuda() is not None, reason="torch is for GPUs")
)

Start = Callable[..., Any]
_SECRET = "a-secret-of-the-environment"


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory, example: Path) -> Path:
    folder = tmp_path_factory.mktemp("snapshots")
    made = subprocess.run(
        [MEDUSA, "snapshot", "--out", folder, "--model", example], env=plain_environ() | {"A_TOKEN": _SECRET},
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    assert made.stdout.startswith(place(str(folder), "torch") + ": ")
    return folder


@pytest.fixture
def resumed(start: Start, snapshots: Path) -> Start:
    def start_resumed(*arguments: str | Path, env: dict[str, str] | None = None) -> Any:
        serving = start(*arguments, "--snapshots", snapshots, env=env)
        assert serving.request("GET", "/livez")[0] == 200
        assert continues(serving.process.pid), (serving.folder / "serve.log").read_text()
        return serving

    return start_resumed


def test_it_answers_as_without_a_snapshot_and_leaves_nothing_behind(
    resumed: Start, start: Start, example: Path
) -> None:
    plain, serving = start("--model", example, "--snapshots", "none"), resumed("--model", example)
    assert serving.complete()["choices"] == plain.complete()["choices"]
    assert not continues(plain.process.pid)
    roles = serving.children()
    assert {"zygote", "engine", "function"} <= {*roles.values()}, roles
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in (serving.process.pid, plain.process.pid)}
    assert len(names) == 1
    stages = serving.request("GET", "/timeline")[1]["stages"]
    assert {"exec", "bind", "index", "fetch", "import", "skeleton", "apply"} <= {stage["name"] for stage in stages}
    assert serving.stop() == 0
    assert plain.stop() == 0


def test_a_crashed_engine_and_a_crashed_worker_are_replaced(resumed: Start, example: Path) -> None:
    serving = resumed("--model", example)
    first = serving.complete()["choices"]
    for role in ("engine", "zygote"):
        os.kill(pid := serving.child(role), signal.SIGKILL)
        while serving.children().get(pid) == role:
            time.sleep(0.01)
        assert serving.complete()["choices"] == first
    assert serving.stop() == 0


def test_a_handler_has_torch_with_numpy_and_gradients(resumed: Start, example: Path, tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(
        """
import numpy
import torch


class Handler:
    def load(self, context):
        self.model = context.model

    def predict(self, request):
        weight = torch.nn.Parameter(torch.from_numpy(numpy.arange(3.0)))
        (weight * weight).sum().backward()
        return {
            "gradient": weight.grad.numpy().tolist(),
            "text": self.model.generate("def", max_tokens=2, temperature=0),
            "threads": torch.get_num_threads(),
        }
"""
    )
    serving = resumed("--model", example, "--handler", tmp_path / "handler.py")
    status, answer, _ = serving.request("POST", "/", {})
    assert status == 200, (serving.folder / "serve.log").read_text()
    assert answer["gradient"] == [0.0, 2.0, 4.0]
    assert answer["text"]
    default = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    assert answer["threads"] == int(
        subprocess.run(default, env=plain_environ(), capture_output=True, check=True).stdout
    )
    assert serving.stop() == 0


def test_instances_of_one_snapshot_sample_differently(resumed: Start, example: Path) -> None:
    texts = []
    for _ in range(2):
        serving = resumed("--model", example)
        answer = serving.complete(max_tokens=32, temperature=1.5)
        texts.append((answer["id"], answer["choices"][0]["text"]))
        assert serving.stop() == 0
    assert texts[0][0] != texts[1][0]
    assert texts[0][1] != texts[1][1]


@pytest.mark.parametrize("arguments", [_PLAIN, ("--snapshots", "none"), ("--snap", "none")])
def test_settings_that_need_another_process_get_one(
    arguments: tuple[str, ...], start: Start, example: Path, snapshots: Path
) -> None:
    serving = start("--model", example, "--snapshots", snapshots, *arguments, env={"MEDUSA_MODLE": "x"})
    assert serving.complete()["choices"]
    assert not continues(serving.process.pid)
    assert (serving.folder / "serve.log").read_text().count("did you mean MEDUSA_MODEL") == 1
    assert serving.stop() == 0


def test_a_snapshot_of_other_circumstances_is_named_and_not_used(start: Start, example: Path, snapshots: Path) -> None:
    serving = start("--model", example, "--snapshots", snapshots, env={"OMP_NUM_THREADS": "1"})
    assert serving.complete()["choices"]
    assert not continues(serving.process.pid)
    expected = "the snapshot is not used: it was made with no OMP_NUM_THREADS, found OMP_NUM_THREADS=1"
    assert expected in (serving.folder / "serve.log").read_text()
    assert serving.stop() == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_continues_from_what_root_has_saved(start: Start, example: Path, snapshots: Path) -> None:
    wrapper = ["setpriv", "--reuid", "4321", "--regid", "4321", "--clear-groups"]
    version = [*wrapper, sys.executable, "-c", "import sys; print(sys.version)"]
    if subprocess.run(version, capture_output=True, text=True, check=False).stdout.strip() != sys.version:
        pytest.skip("this Python is for its owner only")
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        os.chmod(folder, 0o755)
        subprocess.run(["cp", "-r", snapshots, f"{folder}/snapshots"], check=True)
        os.chmod(f"{folder}/snapshots", 0o755)
        serving = start("--model", example, "--snapshots", f"{folder}/snapshots", wrapper=wrapper)
        serving.temporary.chmod(0o777)
        assert serving.complete()["choices"]
        assert continues(serving.process.pid)
        status = Path(f"/proc/{serving.child('worker')}/status").read_text()
        assert [line.split()[1:] for line in status.splitlines() if line.startswith(("Uid", "Gid"))] == [
            ["4321"] * 4
        ] * 2
        assert serving.stop() == 0


def test_an_agent_continues_from_it_and_gives_its_engines_to_functions(
    start_node: Start, start: Start, resumed: Start, snapshots: Path, example: Path
) -> None:
    node = start_node("--prewarm", "torch=1", "--snapshots", str(snapshots))
    node.wait_warm()
    assert continues(node.process.pid)
    (warm,) = node.status()["engines"]["torch"]["pids"]
    plain = start("--model", example, "--snapshots", "none")
    serving = resumed("--model", example, "--node-socket", node.socket)
    assert serving.complete()["choices"] == plain.complete()["choices"]
    assert node.status()["engines"]["torch"]["taken"] == 1
    stages = serving.request("GET", "/timeline")[1]["stages"]
    assert [each["detail"]["kept"] for each in stages if each["name"] == "tokenizer"] == [True]
    assert Path(f"/proc/{warm}").exists()
    assert medusa("node", "ping", "--socket", node.socket).returncode == 0
    assert serving.stop() == plain.stop() == 0
    node.wait_warm()
    assert node.stop() == 0


@pytest.mark.parametrize("flags", [_PLAIN, ("--prewarm", "torch=0,vllm=0"), ("--pre", "vllm=0")])
def test_an_agent_that_needs_other_engines_imports_them(
    flags: tuple[str, str], start_node: Start, snapshots: Path
) -> None:
    node = start_node("--prewarm", "torch=1", *flags, "--snapshots", str(snapshots))
    assert not continues(node.process.pid)
    assert node.stop() == 0


def test_the_doctor_says_whether_it_is_used(snapshots: Path, tmp_path: Path) -> None:
    def finding(*arguments: str | Path) -> str:
        output = medusa("doctor", "--port", "0", *arguments).stdout
        return next(line for line in output.splitlines() if line.split()[1] == "snapshot")

    assert finding("--snapshots", snapshots).split() == ["ok", "snapshot", place(str(snapshots), "torch")]
    assert f"none in {tmp_path}; with `medusa snapshot --out {tmp_path}`" in finding("--snapshots", tmp_path)
    assert finding("--snapshots", "none").startswith("-")
    subprocess.run(["cp", "-r", snapshots, tmp_path / "other"], check=True)
    os.truncate(Path(place(str(tmp_path / "other"), "torch"), MEMORY), 4096)
    assert "its memory was not written as a whole" in finding("--snapshots", tmp_path / "other")


def test_a_folder_without_a_snapshot_is_named(start: Start, example: Path, tmp_path: Path) -> None:
    serving = start("--model", example, "--snapshots", tmp_path)
    assert serving.complete()["choices"]
    log = (serving.folder / "serve.log").read_text()
    assert f"the snapshot is not used: there is none for --engine torch in {tmp_path}" in log
    assert f"`medusa snapshot --out {tmp_path}` makes a new one" in log
    assert serving.stop() == 0


def test_a_folder_of_snapshots_may_be_moved(start: Start, example: Path, snapshots: Path, tmp_path: Path) -> None:
    moved = snapshots.rename(tmp_path / "moved")
    try:
        serving = start("--model", example, "--snapshots", moved)
        assert serving.complete()["choices"]
        assert continues(serving.process.pid)
        assert serving.stop() == 0
    finally:
        moved.rename(snapshots)


def test_a_handler_gets_the_packages_beside_it(start: Start, snapshots: Path, tmp_path: Path) -> None:
    (tmp_path / "urllib3").mkdir()
    (tmp_path / "urllib3" / "__init__.py").write_text("own = 1")
    (tmp_path / "handler.py").write_text("def handle(request):\n    import urllib3; return {'own': urllib3.own}\n")
    serving = start("--handler", tmp_path / "handler.py", "--snapshots", snapshots)
    serving.wait_ready()
    assert serving.request("POST", "/", {})[:2] == (200, {"own": 1})
    log = (serving.folder / "serve.log").read_text()
    assert "the snapshot is not used: it has another module urllib3 than the one beside the handler\n" in log
    assert serving.stop() == 0


def test_what_a_handler_prints_comes_at_once(resumed: Start, tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("def handle(request):\n    print('printed by it')\n    return {}\n")
    serving = resumed("--handler", tmp_path / "handler.py", env={"PYTHONUNBUFFERED": "1"})
    serving.wait_ready()
    assert serving.request("POST", "/", {})[0] == 200
    assert "printed by it" in (serving.folder / "serve.log").read_text()
    assert serving.stop() == 0


def test_the_file_has_nothing_of_the_environment_it_was_made_in(snapshots: Path) -> None:
    memory = Path(place(str(snapshots), "torch"), MEMORY)
    assert _SECRET.encode() not in memory.read_bytes()


def test_tokenizers_of_models_are_kept(start: Start, snapshots: Path, example: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    subprocess.run(["cp", "-r", example, changed], check=True)
    tokenizer = json.loads((changed / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    for model, kept in ((example, True), (changed, False)):
        ids = []
        for folder in (snapshots, "none"):
            serving = start("--model", model, "--snapshots", folder)
            ids.append(serving.request("POST", "/tokenize", {"prompt": "Some Text"})[1]["tokens"])
            assert continues(serving.process.pid) == (folder == snapshots)
            stages = serving.request("GET", "/timeline")[1]["stages"]
            [found] = [stage["detail"]["kept"] for stage in stages if stage["name"] == "tokenizer"]
            assert found == (kept and folder == snapshots)
            assert serving.stop() == 0
        assert ids[0] == ids[1]


def test_tokenizers_that_cannot_be_kept(example: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (bare := tmp_path / "bare").mkdir()
    for folder in (tmp_path, bare):
        for name in ("config.json", "model.safetensors"):
            (folder / name).symlink_to(example / name)
    for flags, message in (
        (("--model", tmp_path), "no snapshot was made: tokenizer.json: expected the JSON of a fast tokenizer"),
        (("--model", tmp_path / "none"), "none"),
        (("--model", bare), "expected a model with a tokenizer.json, found none"),
        (("--model", ""), "found an empty text"),
    ):
        refused = medusa("snapshot", "--out", tmp_path / "out", *flags)
        assert refused.returncode in (1, 2)
        assert message in refused.stderr
        assert len(refused.stderr.splitlines()) == 1, refused.stderr
        assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_bad_calls_are_one_line_and_removing_removes(tmp_path: Path, snapshots: Path) -> None:
    (tmp_path / "file").touch()
    refused = medusa("snapshot", "--out", tmp_path / "file")
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    for flags, status in (((), 2), (("--if-possible",), 0)):
        refused = medusa("snapshot", "--out", tmp_path / "none", *flags, env={"MEDUSA_ENGINE": "cluster"})
        assert refused.returncode == status
        assert "MEDUSA_ENGINE=cluster: there are snapshots for torch or vllm only" in refused.stdout + refused.stderr
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", snapshots, other], check=True)
    assert medusa("snapshot", "--out", other, "--remove").returncode == 0
    assert list(other.iterdir()) == []
    assert medusa("serve", "--help").stdout.count("--snapshots") >= 1


@pytest.fixture(scope="module")
def for_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which Python finds a torch that says that it was built for GPUs."""
    installed = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]
    folder = tmp_path_factory.mktemp("for-gpus")
    (folder / "torch").mkdir()
    for path in installed.iterdir():
        if path.name not in ("version.py", "__pycache__"):
            (folder / "torch" / path.name).symlink_to(path)
    version = (installed / "version.py").read_text()
    (folder / "torch/version.py").write_text(f"{version}\ncuda = '13.0'\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_a_torch_for_gpus_is_imported_as_a_whole_and_only_if_asked_for(
    for_gpus: dict[str, str], start: Start, example: Path, tmp_path: Path
) -> None:
    left_out = medusa("snapshot", "--out", tmp_path, "--if-possible", env=for_gpus)
    assert (left_out.returncode, list(tmp_path.iterdir())) == (0, [])
    assert "on a GPU, starts from one are untried" in left_out.stdout
    assert medusa("snapshot", "--out", tmp_path, env=for_gpus).returncode == 0
    (tmp_path / "handler.py").write_text(
        "import sys\nimport torch\n\n\ndef handle(request):\n"
        "    return {'cuda': torch.version.cuda, 'whole': type(sys.modules['torch.fx']).__name__}\n"
    )
    # Nothing of it is lazy, which is what the setting asks for.
    flags = ("--model", example, "--snapshots", tmp_path, "--torch-import", "plain")
    serving = start(*flags, "--handler", tmp_path / "handler.py", env=for_gpus)
    assert serving.request("POST", "/", {})[:2] == (200, {"cuda": "13.0", "whole": "module"})
    assert continues(serving.process.pid)
    assert serving.stop() == 0
    serving, plain = start(*flags, env=for_gpus), start("--model", example, "--snapshots", "none")
    assert serving.complete()["choices"] == plain.complete()["choices"]
    assert continues(serving.process.pid)
    assert serving.stop() == plain.stop() == 0


def test_arguments_that_are_refused_are_refused_as_ever(snapshots: Path) -> None:
    plain, resumed = (
        subprocess.run(
            [MEDUSA, "serve", "--port", "no"], env=plain_environ() | {"MEDUSA_SNAPSHOTS": where}, capture_output=True,
            text=True, check=False,
        )
        for where in ("none", str(snapshots))
    )  # fmt: skip
    assert plain.returncode == resumed.returncode == 2
    assert plain.stderr == resumed.stderr
    assert json.dumps(plain.stdout) == json.dumps(resumed.stdout)
