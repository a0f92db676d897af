"""`medusa serve --engine vllm` continues from what `medusa snapshot --engine vllm` has saved."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.bench.coldstart.resumed import continues
from medusa_adapters.cli.serving_process import VARIABLES
from medusa_process import MEDUSA, medusa
from medusa_snapshot.conditions import variables
from plain_environ import plain_environ

Start = Callable[..., Any]
PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="snapshots are for x86-64 and aarch64"),
]


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory, example: Path) -> Path:
    folder = tmp_path_factory.mktemp("snapshots")
    made = subprocess.run(
        [MEDUSA, "snapshot", "--engine", "vllm", "--out", folder, "--model", example], env=plain_environ(),
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture
def vllm(start: Start, snapshots: Path, example: Path) -> Start:
    def start_vllm(*arguments: str | Path, env: dict[str, str] | None = None) -> Any:
        serving = start("--model", example, "--engine", "vllm", "--snapshots", snapshots, *arguments, env=env)
        assert serving.request("GET", "/livez")[0] == 200
        return serving

    return start_vllm


def ask(serving: Any, path: str = "/v1/completions", **body: Any) -> Any:
    body = body or {"prompt": "def ", "max_tokens": 8, "temperature": 0}
    status, answer, _ = serving.request("POST", path, body, timeout_s=PATIENCE_S)
    assert status == 200, (answer, (serving.folder / "serve.log").read_text())
    return answer


def test_it_answers_as_without_a_snapshot_on_all_routes(vllm: Start) -> None:
    plain, resumed = vllm("--snapshots", "none"), vllm()
    assert [continues(plain.process.pid), continues(resumed.pid)] == [False, True]
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    question = {"messages": [{"role": "user", "content": "sort"}]}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", greedy | {"prompt": "def ", "logprobs": 2}),
        ("/v1/completions", {"prompt": ["def ", "class "], "temperature": 1.0, "seed": 7, "max_tokens": 8}),
        ("/v1/completions", greedy | {"prompt": "def ", "structured_outputs": {"choice": ["yes", "no"]}}),
        ("/v1/chat/completions", greedy | question),
        ("/tokenize", {"prompt": "def "}),  # vLLM's own server
    ]
    for path, body in requests:
        found = [ask(serving, path, **body) for serving in (plain, resumed)]
        parts = [[answer.get(part) for part in ("choices", "tokens")] for answer in found]
        assert parts[0] == parts[1], path
    pages = [serving.request("GET", "/metrics")[1].decode() for serving in (plain, resumed)]
    names = [set(re.findall("^vllm:[a-z_]+", page, re.MULTILINE)) for page in pages]
    assert len(names[0]) > 50
    assert names[0] == names[1]
    assert resumed.metric("vllm:request_success_total") == 5
    stages = [serving.request("GET", "/timeline")[1]["stages"] for serving in (plain, resumed)]
    assert [[each["detail"]["kept"] for each in of if each["name"] == "tokenizer"] for of in stages] == [
        [False],
        [True],
    ]
    threads = [path.read_text() for path in Path(f"/proc/{resumed.child('engine')}/task").glob("*/comm")]
    assert len([name for name in threads if "gloo_runloop" in name]) <= 2  # vLLM's groups share one
    assert [plain.stop(), resumed.stop()] == [0, 0]


def test_a_crashed_engine_is_replaced(vllm: Start) -> None:
    serving = vllm()
    first = ask(serving)["choices"]
    os.kill(pid := serving.child("engine"), signal.SIGKILL)
    while serving.children().get(pid) == "engine":
        time.sleep(0.01)
    assert ask(serving)["choices"] == first
    assert continues(serving.process.pid)
    assert serving.stop() == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs")
def test_ranks_are_forked_from_it(vllm: Start) -> None:
    serving = vllm("--tensor-parallel", "2")
    assert ask(serving)["choices"]
    assert continues(serving.process.pid)
    assert serving.stop() == 0


def test_a_handler_beside_it_has_numpy_and_its_own_home(vllm: Start, tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(
        """
import huggingface_hub.constants
import numpy
import opentelemetry.sdk.resources
import transformers.utils
import transformers.utils.hub


class Handler:
    def load(self, context):
        self.model = context.model

    def predict(self, request):
        square = numpy.ones((300, 300))
        return {
            "session": transformers.utils.hub.SESSION_ID,
            "instance": opentelemetry.sdk.resources._service_instance_id,
            "offline": huggingface_hub.constants.HF_HUB_OFFLINE,
            "cache": transformers.utils.HF_MODULES_CACHE,
            "sum": float((square @ square).sum()),
            "text": self.model.generate("def", max_tokens=2, temperature=0),
        }
"""
    )
    instances = [vllm("--handler", tmp_path / "handler.py", env={"HOME": str(tmp_path / "home")}) for _ in range(2)]
    answer, other = (ask(serving, "/", some="thing") for serving in instances)
    assert answer["session"] != other["session"]
    assert answer["instance"] is None  # it is made anew
    assert not answer["offline"]  # only the engine is
    assert answer["cache"] == str(tmp_path / "home/.cache/huggingface/modules")
    assert answer["sum"] == 300**3
    assert answer["text"]
    for serving in instances:
        assert continues(serving.process.pid)
        assert serving.stop() == 0


def test_it_logs_what_vllm_does_if_asked(vllm: Start) -> None:
    serving = vllm("--log-level", "debug")
    assert ask(serving)["choices"]
    assert continues(serving.process.pid)
    assert " INFO vllm." in (serving.folder / "serve.log").read_text()
    assert serving.stop() == 0


def test_secrets_are_not_saved(tmp_path: Path) -> None:
    secret = "hf_" + "attacked" * 3
    made = subprocess.run(
        [MEDUSA, "snapshot", "--engine", "vllm", "--out", tmp_path], env=plain_environ() | {"HF_TOKEN": secret},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(secret.encode() in path.read_bytes() for path in files)


# Those whose values are brought up to date, or that change nothing that an instance uses: logs, other processors,
# pure-Python variants of modules, and the defaults of servers and clients that it does not start.
_HARMLESS = (
    r"_?[A-Z]*(LANG|LANGUAGE|LC_[A-Z]+|COLUMNS|LINES|(NO|FORCE)_COLOR|PYCHARM_HOSTED)"
    r"|L?NAME|LOGNAME|USER|USERNAME|PWD|PORT|CI"
    r"|TE?MP|TMPDIR|XDG_RUNTIME_DIR|WEB_CONCURRENCY|[A-Z]+_NO_EXTENSIONS|[A-Z_]*LOG[A-Z_]*|[A-Z_0-9]*DEBUG[A-Z_]*"
    r"|(AITER|CU[DT]|COMPILE_STROBELIGHT|COMPRESSED_TENSORS|ENABLE|FLASHINFER|FX|JAX|LOGURU|MPMATH|NETWORKX|NPU|OAUTH"
    r"|OPENAI|PARTITIONER|PT2|SAGE|SM|SYMPY|TILELANG|TVM|UNSAFE|USE_TORCH|WINDOWS|XLA|_NETWORKX|_PYTHON)[A-Z0-9]*_.*"
    r"|AZURE_OPENAI_ENDPOINT|CLAUDE_CONFIG_DIR|DEFER_PYDANTIC_BUILD|DUMP_AOTI_MINIFIER|EAGER_IMPORT|FAKE_ALLOW_META"
    r"|OPENID_PROVIDER_URL|P[A-Z]+_BACKEND|PROTOCOL_BUFFERS_.*|SETUPTOOLS_.*|TEMPORARILY_.*|LRU_CACHE_CAPACITY"
    r"|OTEL_.*"  # its resources are made again for each start
    r"|(CUSTOM|SAGEMAKER)_.*"  # medusa_vllm.serving.prebuilt
)
_TRACED_IMPORT = """
import os
read, get = set(), type(os.environ).__getitem__
def noting(environ, name):
    read.add(os.fsdecode(name))
    return get(environ, name)
type(os.environ).__getitem__ = noting
from medusa_adapters.cli import serving_process
assert serving_process._import_vllm() is None
serving_process._import_everything_else()
print(*read)
"""


def test_every_variable_that_is_read_is_a_condition_or_harmless() -> None:
    environ = {name: os.environ[name] for name in ("PATH", "HOME")}
    command = [MEDUSA.with_name("python"), "-c", _TRACED_IMPORT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=120)
    read = dict.fromkeys(done.stdout.splitlines()[-1].split(), "1")
    assert len(read) > 300
    conditions = variables(read, VARIABLES["vllm"])
    secrets_and_ours = ("_KEY", "_TOKEN", "_SECRET", "GOMP_SPINCOUNT", "TORCHINDUCTOR_CACHE_DIR")
    others = [name for name in read.keys() - conditions.keys() - environ.keys() if not name.startswith("PYTHON")]
    assert [name for name in others if not re.fullmatch(_HARMLESS, name) and not name.endswith(secrets_and_ours)] == []


@pytest.mark.parametrize(
    ("arguments", "env", "why"),
    [
        (("--vllm-mode", "compatible"), {}, ""),
        ((), {"VLLM_LOGGING_LEVEL": "ERROR"}, "it was made with no VLLM_LOGGING_LEVEL, found VLLM_LOGGING_LEVEL=ERROR"),
    ],
)
def test_settings_that_need_another_process_get_one(
    arguments: tuple[str, ...], env: dict[str, str], why: str, vllm: Start
) -> None:
    serving = vllm(*arguments, env=env)
    assert ask(serving)["choices"]
    assert not continues(serving.process.pid)
    assert why in (serving.folder / "serve.log").read_text()
    assert serving.stop() == 0


def test_the_torch_engine_and_the_doctor_look_for_their_own(
    start: Start, vllm: Start, snapshots: Path, example: Path
) -> None:
    serving = start("--model", example, "--engine", "torch", "--snapshots", snapshots)
    assert serving.complete()["choices"]
    assert f"there is none for --engine torch in {snapshots}" in (serving.folder / "serve.log").read_text()
    assert serving.stop() == 0
    lines = medusa("doctor", "--port", "0", "--engine", "vllm", "--snapshots", snapshots).stdout.splitlines()
    assert next(line for line in lines if line.split()[1] == "snapshot").split()[0] == "ok"
