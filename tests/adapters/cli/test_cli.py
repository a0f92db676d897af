"""The command as a person calls it: real processes, exit statuses, one line for an error."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

import pytest
from medusa_adapters.cli.progress import ProgressLine, describe, size
from medusa_adapters.cli.serve import Console
from medusa_runtime.config import OPTIONS
from medusa_runtime.region.reader import Progress
from medusa_runtime.timeline import Stage
from vllm_installed import vllm_is_installed

MEDUSA = Path(sys.executable).with_name("medusa")
MS = 1_000_000
MODEL = str(Path(__file__).parents[3] / "examples" / "pydoc-lm")


def medusa(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MEDUSA_") and key != "PORT"}
    return subprocess.run([MEDUSA, *arguments], capture_output=True, text=True, env=clean | environ, timeout=240)


def refused(*arguments: str, **environ: str) -> str:
    """The one line on stderr of a call that must end with status 2."""
    result = medusa(*arguments, **environ)
    assert result.returncode == 2, result
    (line,) = result.stderr.splitlines()
    assert line.startswith("medusa: ")
    assert line.endswith("]")
    return line


def test_help_names_the_commands() -> None:
    result = medusa("--help")
    assert result.returncode == 0
    for name in ("serve", "fetch", "inspect", "bench", "doctor"):
        assert f"\n    {name} " in result.stdout


def test_every_setting_has_a_flag_whose_help_names_the_variable() -> None:
    text = " ".join(medusa("serve", "--help").stdout.split())
    for option in OPTIONS:
        assert f"{option.flag} {option.form}" in text
        assert option.variable in text


def test_version() -> None:
    result = medusa("--version")
    assert (result.returncode, result.stdout.split()[0]) == (0, "medusa-runtime")


def test_the_way_to_serve_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom medusa_adapters.cli.command_line import _parse\n"
        "_parse(['serve', '--model', 'x'])\nimport medusa_runtime.instance\n"
        "from medusa_adapters.cli.serve import resolve_settings\nresolve_settings({}, {'model': 'x'})\n"
        "heavy = {'torch', 'flask', 'gunicorn', 'tokenizers', 'numpy', 'boto3', 'medusa_adapters.cli.doctor', "
        "'zipfile', 'medusa_adapters.platforms.sagemaker', 'medusa_adapters.platforms.lambda_', "
        "'medusa_adapters.report.html', 'importlib.metadata'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_nothing_to_serve() -> None:
    assert "--model" in refused("serve")


def test_a_bad_flag_and_a_bad_variable_are_named() -> None:
    assert "--port='http'" in refused("serve", "--model", "x", "--port", "http")
    assert "MEDUSA_ENGINE='onnx'" in refused("serve", "--model", "x", MEDUSA_ENGINE="onnx")


def test_unknown_commands_and_flags_are_refused() -> None:
    assert "'server' is no command; did you mean serve? Expected one of" in refused("server")
    assert "expected a command before --token, such as medusa serve --token …; see" in refused("--token=x", "serve")
    assert "--modle; did you mean --model? see medusa serve --help" in refused("serve", "--modle", "x")
    wrong = refused("deploy", "knative", "f", "--imgae", "x")
    assert "--imgae; did you mean --image? see medusa deploy knative --help" in wrong  # values may be secrets
    assert "is called" not in refused("fetch", "x", "--concurrency", "3")  # which has it under neither name
    assert "found 'x.py'; code is given as --handler" in refused("serve", "x.py")


def test_a_misspelt_flag_is_the_one_of_the_same_letters() -> None:
    assert "--modle; did you mean --model? see" in refused("deploy", "kserve", "--modle", "x")  # not --mode


def test_the_program_behind_a_wrong_flag_is_not_listed() -> None:
    line = refused("cluster", "lab", "--port", "8395", "--nodes", "2", "--", "curl", "-s", "http://x")
    assert "arguments: --port; did you mean --gateway-port? see" in line


def test_flags_of_vllm_are_sent_behind_the_dashes() -> None:
    behind = "flags of vllm serve follow behind --: --engine vllm … -- "
    for given, meant in (
        (("--swap-space", "4"), f"--swap-space; {behind}--swap-space;"),
        (("--enforce-eager", "--engine", "vllm"), f"? {behind}--enforce-eager;"),
    ):
        assert meant in refused("serve", "m", *given)


@pytest.mark.parametrize("command", ["serve", "batch", "materialize"])
def test_a_command_that_takes_flags_of_vllm_says_so(command: str) -> None:
    said = " ".join(medusa(command, "--help").stdout.split())
    assert "With --engine vllm, flags of vllm serve follow behind --." in said


@pytest.mark.parametrize("command", ["serve", "materialize"])
def test_flags_of_vllm_are_for_vllm(command: str) -> None:
    assert "need --engine vllm, found --engine torch" in refused(command, "m", "--engine", "torch", "--", "--seed", "0")


def test_the_node_agent_is_started_by_no_word() -> None:
    assert "expected `medusa node` alone, which starts the agent, found 'start'" in refused("node", "start")


@pytest.mark.parametrize("command", ["gateway", "start --head"])
def test_a_form_of_the_log_that_is_none_is_refused(command: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # with a short path, for sockets
        line = refused("cluster", *command.split(), f"--dir={folder}", MEDUSA_LOG_FORMAT="xml")
    assert "MEDUSA_LOG_FORMAT='xml' cannot be used: expected one of text, json" in line


@pytest.mark.parametrize("port", ["٨٠", "9" * 5000, "65536", "-1", " 80", ""])
def test_a_port_of_the_gateway_is_five_digits_at_most(port: str) -> None:
    line = refused("cluster", "gateway", f"--port={port}")
    assert "argument --port: expected a port from 0 to 65535, found " in line
    assert len(line) < 200


def test_a_cluster_deploys_no_model_without_a_name_for_it(tmp_path: Path) -> None:
    line = refused("cluster", "deploy", "m", "--model", "", "--dir", str(tmp_path))
    assert "--model: expected a URL, or a checkpoint's folder that is there on every node, found ''" in line


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_a_drain_waits_for_seconds(seconds: str, tmp_path: Path) -> None:
    line = refused("cluster", "drain", "n1", f"--wait-s={seconds}", "--dir", str(tmp_path))
    assert f"--wait-s: expected seconds, 0 or more, found {seconds} [" in line


def test_without_a_command_the_help_is_shown() -> None:
    result = medusa()
    assert result.returncode == 2
    assert result.stderr.startswith("usage: medusa")


def test_a_misspelt_variable_is_named() -> None:
    result = medusa("serve", MEDUSA_MODLE="x", MEDUSA_PORT="80", MEDUSA_SERVICE_HOST="10.0.0.1", MEDUSA_NODE_PIN="x")
    assert result.returncode == 2
    assert [line.rpartition("; ")[2] for line in result.stderr.splitlines()[:-1]] == [
        "did you mean MEDUSA_MODEL?",
        "did you mean PORT?",
    ]


def test_a_flag_of_another_engine_is_named() -> None:
    result = medusa("serve", "--model", "/nothing", "--port", "0", "--compile", "always", MEDUSA_VLLM_MODE="compatible")
    assert [line for line in result.stderr.splitlines() if line.startswith("WARNING")] == [
        "WARNING: --compile has no effect with --engine torch; it is for --engine vllm"
    ]


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused("serve", "--model", "x", "--host", "127.0.0.1", "--port", port)
    assert port in line
    assert "in use" in line
    assert "--port" in line


def test_debug_shows_the_traceback() -> None:
    result = medusa("serve", MEDUSA_LOG_LEVEL="debug")
    assert result.returncode != 0
    assert "Traceback" in result.stderr
    assert "ConfigError" in result.stderr


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = f"{MEDUSA} serve --help | head -1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=240)
    assert result.stderr == ""


def stages() -> list[Stage]:
    return [
        Stage("exec", "supervisor", 0, 30 * MS, {}),
        Stage("import", "zygote", 30 * MS, 900 * MS, {}),
        Stage("ready", "engine", 900 * MS, 900 * MS, {}),
    ]


def progress(fetched: int, rate: float | None = None, eta: float | None = None) -> Progress:
    return Progress("fetching", fetched, 2_000_000_000, rate, eta, None)


def test_the_console_tells_of_a_start() -> None:
    stream = StringIO()
    console = Console(stream, width=80)
    console.bound("http://127.0.0.1:8080")
    console.progress(progress(0))
    console.ready(stages())
    console.first_token([*stages(), Stage("first_token", "engine", 950 * MS, 950 * MS, {})])
    text = stream.getvalue()
    assert text.startswith("listening on http://127.0.0.1:8080\n")
    assert "█" in text
    assert "\nready on http://127.0.0.1:8080\n" in text
    assert text.endswith("first token 950 ms after the start\n")
    assert "\r" not in text


def read_until(descriptor: int, ending: str) -> str:
    """Return what a terminal shows up to `ending`; one read may return a part of what was written."""
    text = ""
    while ending not in text:
        text += os.read(descriptor, 65536).decode()
    return text


def test_a_terminal_gets_one_moving_line() -> None:
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as stream:
        console = Console(stream, width=80)
        console.progress(progress(500_000_000, 734.0, 2.0))
        console.progress(progress(1_000_000_000, 734.0, 1.4))
        text = read_until(parent, "1 s left")
        assert text.count("\r\x1b[2K") == 2
        assert "\n" not in text
        assert "1.0 GB of 2.0 GB (50 %), 734 MB/s, 1 s left" in text
        console.ready(stages())
        assert read_until(parent, "\n").startswith("\r\x1b[2K\r\n")
    os.close(parent)


def test_a_closed_output_does_not_end_the_instance() -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    os.close(reader)
    console = Console(stream, width=80)
    console.bound("http://127.0.0.1:8080")
    console.ready(stages())
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_stream_that_knows_no_blocks_gets_what_it_knows(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w", encoding="ascii") as stream:
        Console(stream, width=80).ready(stages())
    assert "import" in (tmp_path / "log").read_text()


def test_plain_progress_is_rare() -> None:
    written: list[str] = []
    line = ProgressLine(written.append, moving=False)
    for fetched in range(0, 2_000_000_000, 1_000_000):
        line.show(progress(fetched))
    line.end()
    assert written == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (57_200_000, "57.2 MB"), (1_630_000_000, "1.6 GB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_progress_without_a_rate() -> None:
    assert describe(progress(0)) == "0 bytes of 2.0 GB (0 %)"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--model", "x", "--hold-s", "1m"), "--hold-s='1m' cannot be used: expected seconds, such as 90"),
        (("serve", "--model", "x", "--host", "no.invalid"), "expected an address of this machine as --host"),
        (("deploy", "lambda", "a", "--memory-mb", "2Gi"), "--memory-mb='2Gi' cannot be used: expected a whole number"),
        (("deploy", "knavite", "a"), "; did you mean knative?"),
        (("materialize", "--model", MODEL, "--engine", "vllm"), "--engine vllm needs vLLM"),
    ],
)
def test_what_is_expected_is_said(arguments: tuple[str, ...], said: str) -> None:
    if "vllm" in arguments and vllm_is_installed():
        pytest.skip("vLLM is installed")
    assert said in refused(*arguments)


def test_the_templates_are_listed_a_line_each() -> None:
    lines = medusa("new", "--help").stdout.splitlines()
    assert "  stream     a generator as server-sent events, no model" in lines
