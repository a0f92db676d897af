"""`medusa materialize`, then a start with what it made: the command, the files, and what damage does to them.

The bundle that starts use is made by a process. What else is made is made in this one, which has torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import MEDUSA_MAIN, ForkServer
from medusa_command import medusa
from plain_environ import plain_environ
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"
KINDS = {"weight-index", "kv-plan", "stage-times"}


def stages(serving: Any) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for stage in serving.request("GET", "/timeline")[1]["stages"]:
        found.setdefault(stage["name"], []).append(stage["detail"])
    return found


@pytest.fixture(scope="module")
def materialized(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """A copy of the example with its bundle; its inodes and times are not the example's."""
    folder = tmp_path_factory.mktemp("page") / "model"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns(".medusa"))
    words = ["materialize", "--model", str(folder), "--starts", "1"]
    result = fork_server.run(MEDUSA_MAIN, words, environ=plain_environ())
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert {line[0] for line in lines[:-1]} == KINDS
    assert f"{folder}/.medusa: 3 artifacts" in result.stdout
    return folder


def masked(text: str) -> list[str]:
    """Without what differs between runs and machines: sizes, times, algorithms, and the blanks that align them."""
    text = re.sub(r"checksums by .*", "checksums", text)
    text = re.sub(r"\b[\d.]+ (bytes|kB|MB|s|ms|starts?)\b", "N", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_page_about_it_shows_what_happens(materialized: Path) -> None:
    """The printed session, in a folder where ``model`` is the example."""
    page = (Path(__file__).parents[2] / "docs" / "state-bundle.md").read_text()
    session = re.findall(r"```\n(.*?)```", page, re.DOTALL)[0]
    _, making, inspecting, serving = re.split(r"^\$ medusa (.*\n)", session, flags=re.MULTILINE)[::2][:4]
    assert serving == ""
    commands = re.findall(r"^\$ medusa (.*)", session, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["materialize", "inspect", "serve"]
    shown = medusa("inspect", "model", folder=materialized.parent)
    assert masked(shown.stdout) == masked(inspecting)
    made = json.loads((materialized / ".medusa" / "manifest.json").read_bytes())["artifacts"]
    assert {line.split()[0] for line in making.splitlines()[:-1]} == {artifact["kind"] for artifact in made}


@pytest.fixture
def model(materialized: Path, tmp_path: Path) -> Path:
    """A copy of one's own, to damage."""
    shutil.copytree(materialized, tmp_path / "model")
    return tmp_path / "model"


def test_inspect_tells_what_is_in_the_bundle_and_what_fits(materialized: Path) -> None:
    found = json.loads(medusa("inspect", materialized, "--json", "--verify").stdout)["state"]
    assert {artifact["kind"]: artifact["problem"] for artifact in found["artifacts"]} == dict.fromkeys(KINDS)
    text = medusa("inspect", materialized, "--dtype", "float32").stdout
    assert "kv-plan" in text
    assert "not used here: it was made for dtype bfloat16, here it is float32" in text
    assert "38 tensors, order of a forward, checksums by" in text
    assert "state    none; make it with medusa materialize" in medusa("inspect", EXAMPLE, "--state", "none").stdout


@pytest.mark.forked
def test_a_start_uses_the_bundle_wherever_it_was_copied(model: Path, start: Callable[..., Any]) -> None:
    plain = start("--model", EXAMPLE, "--state", "none")
    expected = plain.complete()["choices"][0]["text"]
    assert plain.stop() == 0
    serving = start("--model", model, env={"HOME": str(model)})
    assert serving.complete()["choices"][0]["text"] == expected
    found = stages(serving)
    assert {detail["artifact"] for detail in found["restore"] if "left_out" not in detail} == {
        "weight-index",
        "kv-plan",
    }
    assert [detail["source"] for detail in found["kv_plan"]] == ["recorded"]
    assert "is not used" not in serving.output()
    assert serving.stop() == 0


@pytest.mark.forked
def test_a_start_with_a_broken_bundle_answers_the_same(model: Path, start: Callable[..., Any]) -> None:
    path = model / ".medusa" / "manifest.json"
    document = json.loads(path.read_bytes())
    for artifact in document["artifacts"]:
        del artifact["inline"]
    path.write_text(json.dumps(document))
    for blob in (model / ".medusa" / "blobs").iterdir():
        os.truncate(blob, blob.stat().st_size // 2)
    serving = start("--model", model)
    assert serving.complete()["choices"][0]["text"]
    left_out = {detail["artifact"]: detail["left_out"] for detail in stages(serving)["restore"]}
    assert left_out.keys() == {"weight-index", "kv-plan"}
    assert all("bytes, expected" in reason for reason in left_out.values())
    for kind in left_out:
        assert serving.output().count(f"{kind} is not used") == 1
    assert serving.stop() == 0


def test_materializing_again_replaces_and_keeps_what_is_for_others(model: Path) -> None:
    result = medusa("materialize", "--model", model, "--starts", "0", "--max-model-len", "64")
    assert result.returncode == 0, result.stderr
    manifest = json.loads((model / ".medusa" / "manifest.json").read_bytes())
    lengths = sorted(a["key"]["max_model_len"] for a in manifest["artifacts"] if a["kind"] == "kv-plan")
    assert lengths == ["512", "64"]
    assert sum(artifact["kind"] == "weight-index" for artifact in manifest["artifacts"]) == 1
    named = {artifact["sha256"] for artifact in manifest["artifacts"]}
    assert {blob.name for blob in (model / ".medusa" / "blobs").iterdir()} == named


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--model", "s3://bucket/model"), "expected --out DIR"),
        (("--model", "/no/such/model"), "expected a folder with a checkpoint, found nothing"),
        ((), "expected a checkpoint: medusa materialize URL, or --model URL"),
        (("--model", str(EXAMPLE), "--out", "/proc/self/state"), "cannot be written there"),
        (("--model", str(EXAMPLE), "--starts", "-1"), "--starts=-1"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple[str, ...], expected: str) -> None:
    result = medusa("materialize", *arguments)
    assert result.returncode != 0
    (line,) = result.stderr.splitlines()
    assert expected in line


def requests_file(folder: Path, *bodies: dict[str, Any], **changes: Any) -> Path:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body, **changes}
        for number, body in enumerate(bodies)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "prompts.jsonl"


SYSTEM = "class Store:\n" + "".join(f"    def read_{n}(self, key: str) -> bytes: ...\n" for n in range(9))


@pytest.mark.forked
def test_a_start_does_not_compute_recorded_prompts(
    materialized: Path, tmp_path: Path, start: Callable[..., Any]
) -> None:
    shutil.copytree(materialized, tmp_path / "model")
    prompts = requests_file(tmp_path, {"prompt": SYSTEM, "max_tokens": 50}, {"prompt": SYSTEM + "    def write"})
    result = medusa("materialize", "--model", tmp_path / "model", "--prompts", prompts, "--starts", "0")
    assert result.returncode == 0, result.stderr
    shown = medusa("inspect", tmp_path / "model").stdout
    assert re.search(r"prompts +\d+ bytes +\d+ tokens", shown)
    assert re.search(r"prompt-kv +[\d.]+ kB", shown)
    question = {"prompt": SYSTEM + "    def close", "max_tokens": 8, "temperature": 0}

    def answer(*flags: str) -> tuple[str, dict[str, Any]]:
        serving = start("--model", tmp_path / "model", *flags)
        status, found, *_ = serving.request("POST", "/v1/completions", question)
        assert status == 200
        restored = {detail["artifact"] for detail in stages(serving).get("restore", ())}
        assert ({"prompts", "prompt-kv"} <= restored) == (not flags)
        (first,) = stages(serving)["first_forward"]
        assert serving.stop() == 0
        assert "not used" not in serving.output()
        return found["choices"][0]["text"], {**found["usage"], "first": first["tokens"]}

    text, usage = answer()
    plain, computed = answer("--state", "none")
    assert text == plain
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] - 32 < cached < usage["prompt_tokens"]
    assert usage["first"] == usage["prompt_tokens"] - cached
    assert computed["first"] == computed["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "changes", "flags", "expected"),
    [
        ({"prompt": "Hi"}, {}, (), "expected prompts of 16 tokens or more"),
        ({"prompt": SYSTEM * 9}, {}, (), "line 1: /v1/completions answers 400: this model's maximum context length"),
        ({"prompt": SYSTEM}, {"url": "/v1/nothing"}, (), "line 1: /v1/nothing answers 404"),
        ({"prompt": SYSTEM}, {"method": "GET"}, (), 'line 1: method: expected "POST", found "GET"'),
        ({"prompt": SYSTEM}, {}, ("--engine", "none"), "--prompts is for --engine torch, found --engine none"),
        ({"prompt": SYSTEM}, {}, ("--prompts", "/no/such/file"), "/no/such/file: expected a file with requests"),
        ({"prompt": SYSTEM}, {}, ("--prompts", os.devnull), "expected requests, one a line, found none"),
    ],
)
def test_bad_prompts_are_one_clear_line(
    tmp_path: Path, body: dict[str, Any], changes: dict[str, Any], flags: tuple[str, ...], expected: str
) -> None:
    prompts = requests_file(tmp_path, body, **changes)
    arguments = ("materialize", "--model", EXAMPLE, "--out", tmp_path / "out", "--starts", "0")
    result = medusa(*arguments, "--prompts", prompts, *flags)
    assert result.returncode != 0
    assert expected in result.stderr.splitlines()[-1]


def test_what_torch_saved_is_converted_and_materialized(tmp_path: Path) -> None:
    tensors = {"0.weight": torch.arange(12.0).reshape(3, 4), "0.bias": torch.ones(3)}
    torch.save(tensors, tmp_path / "net.pt")
    arguments = ("materialize", "--engine", "none", "--model", tmp_path / "net.pt", "--convert")
    result = medusa(*arguments, tmp_path / "net.safetensors")
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[:-1]] == ["net.safetensors", "weight-index"]
    found = load_file(tmp_path / "net.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    again = medusa(*arguments, tmp_path / "net.safetensors")
    assert again.returncode == 2
    assert "expected a .safetensors file that does not exist" in again.stderr
    (tmp_path / "two").mkdir()
    known = medusa(*arguments[:4], tmp_path / "net.safetensors", "--convert", tmp_path / "two" / "n.safetensors")
    assert "is safetensors already" in known.stderr
    assert not any((tmp_path / "two").iterdir())


def test_a_bundle_is_signed_and_what_others_put_there_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns(".medusa"))
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    materialize = ("materialize", "--model", folder, "--starts", "0")
    assert medusa(*materialize).returncode == 0
    manifest = folder / ".medusa" / "manifest.json"
    document = json.loads(manifest.read_bytes())
    shape = document["artifacts"][0]["key"]["shape"]
    document["artifacts"].append({"kind": "cuda-graphs", "key": {"shape": shape}, "sha256": "0" * 64, "size": 5})
    manifest.write_text(json.dumps(document))

    plain = medusa(*materialize)  # nor does it become this user's own
    assert "cuda-graphs    left out: it was there already, and not materialized by this user" in plain.stdout
    assert {artifact["kind"] for artifact in json.loads(manifest.read_bytes())["artifacts"]} == {
        "kv-plan",
        "weight-index",
    }
    manifest.write_text(json.dumps(document))

    signed = medusa(*materialize, "--sign", key)
    assert signed.returncode == 0, signed.stderr
    assert "cuda-graphs    left out: it was there already, and not signed with this key" in signed.stdout
    named = signed.stdout.splitlines()[-1].rpartition("--trust-key ")[2]
    assert named.startswith("ed25519:")
    shown = json.loads(medusa("inspect", folder, "--json", "--trust-key", public).stdout)["state"]
    assert shown["signed"] == named
    assert {artifact["kind"] for artifact in shown["artifacts"]} == {"kv-plan", "weight-index"}
    assert f"signed with {named}" in medusa("inspect", folder).stdout

    again = medusa(*materialize)
    assert "signature      left out: the bundle was signed and no longer is; expected --sign" in again.stdout
    bad = medusa(*materialize, "--sign", public)
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1
    assert "expected a PEM file with an ed25519 private key" in bad.stderr
