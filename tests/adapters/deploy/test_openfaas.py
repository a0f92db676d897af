"""`medusa deploy openfaas`: stack.yaml with the fields faas-cli reads, and a template folder as it expects one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from medusa_adapters.trial import Trial
from medusa_command import medusa

# The fields of a function in stack.yaml (faas-cli's schema); an unknown one would be dropped without a word.
FIELDS = {
    *("lang", "handler", "image", "fprocess", "environment", "environment_file", "secrets", "constraints", "labels"),
    *("annotations", "limits", "requests", "readonly_root_filesystem", "build_options", "build_args", "namespace"),
    "platforms",
}
SCALING = {"min", "max", "type", "target", "target-proportion", "zero", "zero-duration", "down.window"}


def deploy(*arguments: str, folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return medusa("deploy", "openfaas", *arguments, folder=folder, environ=environ)


def stack(*arguments: str) -> tuple[str, dict[str, Any]]:
    done = deploy("qwen", "--image=registry.example/qwen:1", *arguments)
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(done.stdout)
    assert set(document) == {"version", "provider", "functions"}
    assert document["provider"]["name"] == "openfaas"
    return done.stdout, document["functions"]["qwen"]


def refused(*arguments: str, **environ: str) -> str:
    done = deploy(*arguments, **environ)
    assert done.returncode in (1, 2), done
    (line,) = done.stderr.splitlines()
    return line


def test_stack_has_known_fields_with_text_for_values(tmp_path: Path) -> None:
    origin = 5 * 10**9
    moments = {"bind": origin, "ready": origin + 30 * 10**9}
    stages = [{"name": n, "process": "p", "start_ns": at, "end_ns": at, "detail": {}} for n, at in moments.items()]
    (tmp_path / "timeline.json").write_text(json.dumps({"stages": stages}))
    text, entry = stack(
        *("--model=s3://b/qwen", "--memory=8Gi", "--cpu=500m", "--gpu-profile=gpu", "--secret=aws", "--namespace=fn"),
        *("--scale-to-zero", "--timeout-s=120", "--max-concurrency=4", f"--timeline={tmp_path / 'timeline.json'}"),
    )
    assert set(entry) <= FIELDS
    for part in ("environment", "labels", "annotations"):
        assert all(isinstance(value, str) for value in entry[part].values()), part
    scaling = {key.removeprefix("com.openfaas.scale.") for key in entry["labels"]}
    assert scaling <= SCALING
    # Idle for as long as ten of its starts take.
    assert entry["labels"]["com.openfaas.scale.zero-duration"] == "300s"
    assert entry["environment"]["exec_timeout"] == "120s"
    assert entry["environment"]["max_inflight"] == "4"
    # Ours would win over what a user says of it with --env.
    assert "MEDUSA_MAX_CONCURRENCY" not in entry["environment"]
    assert entry["environment"]["MEDUSA_PLATFORM"] == "openfaas"
    assert (entry["limits"], entry["requests"]) == ({"memory": "8Gi"}, {"memory": "8Gi", "cpu": "500m"})
    assert entry["annotations"]["com.openfaas.profile"] == "gpu"
    assert "# Scaling to zero needs OpenFaaS Pro" in text


def test_template_is_laid_out_as_faas_cli_reads_it(tmp_path: Path) -> None:
    done = deploy("qwen", "--image=q:1", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    template = tmp_path / "template" / "medusa"
    described = yaml.safe_load((template / "template.yml").read_text())
    # `faas-cli new --lang medusa` looks for a folder of the language's name, in lower case.
    assert described["language"] == template.name == template.name.lower()
    assert described["fprocess"] == "medusa serve"
    assert set(described) <= {"language", "fprocess", "build_options", "welcome_message", "handler_folder"}
    files = {str(path.relative_to(template)) for path in template.rglob("*") if path.is_file()}
    assert files == {
        *("template.yml", "Dockerfile"),
        *(f"function/{name}" for name in ("handler.py", "handler_test.py", "requirements.txt")),
    }
    dockerfile = (template / "Dockerfile").read_text()
    assert "FROM --platform=${TARGETPLATFORM:-linux/amd64}" in dockerfile
    for argument in ("TARGETPLATFORM", "BUILDPLATFORM", "ADDITIONAL_PACKAGE", "TEST_COMMAND", "TEST_ENABLED"):
        assert f"ARG {argument}" in dockerfile
    assert "COPY function/ " in dockerfile
    assert dockerfile.rstrip().endswith("USER app")


def test_the_folder_has_all_that_faas_cli_up_needs(tmp_path: Path) -> None:
    done = deploy("qwen", "--image=q:1", f"--out={tmp_path}", "--base-image=registry.example/medusa:2")
    assert done.returncode == 0, done.stderr
    (function,) = yaml.safe_load((tmp_path / "stack.yaml").read_text())["functions"].values()
    template = tmp_path / "template" / function["lang"]
    built = assemble(template, tmp_path / function["handler"], tmp_path / "build" / "qwen")
    # Every file that the Dockerfile copies is in the build's context, and the base image is one that exists.
    for line in (built / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            assert list(built.glob(line.split()[1].rstrip("/"))), line
    assert function["build_args"] == {"BASE_IMAGE": "registry.example/medusa:2"}
    assert (built / "function" / "handler.py").is_file()
    # What it says to do works: the folder is there, and faas-cli is the command.
    assert f"cd {tmp_path} && faas-cli up -f stack.yaml" in done.stdout


def assemble(template: Path, handler: Path, build: Path) -> Path:
    """The build context that `faas-cli build` makes: the template, and the function's folder as function/."""
    shutil.copytree(template, build)
    shutil.copytree(handler, build / "function", dirs_exist_ok=True)
    return build


def test_a_function_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    assert "expected handler.py" in refused("qwen", "--image=q:1", f"--out={tmp_path}")
    (tmp_path / "qwen" / "handler.py").write_text("mine = 1\n")
    assert deploy("qwen", "--image=q:1", f"--out={tmp_path}").returncode == 0
    assert [path.name for path in (tmp_path / "qwen").iterdir()] == ["handler.py"]
    assert (tmp_path / "qwen" / "handler.py").read_text() == "mine = 1\n"


def test_a_folder_with_its_own_dockerfile(tmp_path: Path) -> None:
    line = refused("qwen", "--image=q:1", f"--out={tmp_path}", "--lang=dockerfile")
    assert "medusa new qwen" in line
    made = medusa("new", "qwen", folder=tmp_path)
    assert made.returncode == 0
    assert deploy("qwen", "--image=q:1", f"--out={tmp_path}", "--lang=dockerfile").returncode == 0
    assert not (tmp_path / "template").exists()


def test_labels_annotations_and_a_registrys_secret() -> None:
    _, entry = stack(
        "--label=team=search", "--annotation=example.com/note=a b", "--secret=aws", "--pull-secret=registry"
    )
    assert entry["labels"]["team"] == "search"
    assert entry["annotations"]["example.com/note"] == "a b"
    assert entry["secrets"] == ["aws", "registry"]
    assert set(entry) <= FIELDS


def test_earlier_names_of_flags_go_on_working() -> None:
    done = deploy("qwen", "--image=q:1", "--timeout=120", "--concurrency=4")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "medusa: --timeout is called --timeout-s now; the old name goes on working",
        "medusa: --concurrency is called --max-concurrency now; the old name goes on working",
    ]
    assert yaml.safe_load(done.stdout)["functions"]["qwen"]["environment"]["exec_timeout"] == "120s"


def test_templates_function_passes_its_test_and_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deploy("qwen", "--image=q:1", f"--out={tmp_path}").returncode == 0
    function = tmp_path / "template" / "medusa" / "function"
    # The command of the Dockerfile's test step.
    command = [sys.executable, "-m", "unittest", "discover", "-p", "*_test.py"]
    ran = subprocess.run(command, cwd=function, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Ran 1 test" in ran.stderr
    monkeypatch.chdir(function)
    monkeypatch.setenv("healthcheck_interval", "100ms")  # it serves for so long after SIGTERM
    monkeypatch.setenv("suppress_lock", "true")  # there is one path for all, and another test looks at it
    with Trial("--handler", "handler.py", "--platform", "openfaas") as served:
        answer = served.post("/", '{"name": "Ada"}')
        assert (answer.status, answer.json) == (200, {"hello": "Ada"})
        assert served.get("/_/health").status == 200


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text("mine: 1\n")
    assert "--force" in refused("qwen", "--image=q:1", f"--out={tmp_path}")
    assert (tmp_path / "stack.yaml").read_text() == "mine: 1\n"
    assert not (tmp_path / "template").exists()
    assert deploy("qwen", "--image=q:1", f"--out={tmp_path}", "--force").returncode == 0
    assert "qwen" in (tmp_path / "stack.yaml").read_text()
    # The same again is no conflict.
    assert deploy("qwen", "--image=q:1", f"--out={tmp_path}").returncode == 0


def test_apply_runs_faas_cli_in_the_folder(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "faas-cli").write_text(f'#!/bin/sh\necho "$PWD $@" > {tools}/call\necho Deployed. 202 Accepted.\n')
    (tools / "faas-cli").chmod(0o755)
    out = tmp_path / "out"
    done = deploy("qwen", "--image=q:1", f"--out={out}", "--apply", PATH=f"{tools}:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (0, "Deployed. 202 Accepted.\n"), done.stderr
    assert (tools / "call").read_text() == f"{out} up -f stack.yaml\n"
    assert "needs faas-cli" in refused("qwen", "--image=q:1", f"--out={out}", "--apply", PATH=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Qwen", "--image=q"], "NAME='Qwen'"),
        (["qwen"], "--image is missing"),
        (["qwen", "--image=q", "--gateway=localhost"], "--gateway='localhost'"),
        (["qwen", "--image=q", "--min-scale=4", "--max-scale=2"], "--max-scale=2"),
        (["qwen", "--image=q", "--timeout-s=0"], "--timeout-s=0"),
        (["qwen", "--image=q", "--memory=1GB"], "--memory='1GB'"),
        (["qwen", "--image=q", "--env=exec_timeout=soon"], "exec_timeout='soon'"),
        (["qwen", "--image=q", "--apply"], "--apply needs --out"),
        (["qwen", "--image=q", "--out=/proc/none"], "cannot be written"),
    ],
)
def test_bad_flags_are_named(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)
