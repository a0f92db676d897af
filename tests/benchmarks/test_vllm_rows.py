"""The rows of vLLM in the cold-start benchmark: what is measured, and what ends it."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from medusa_adapters.bench.coldstart.contestants import Question, Sample
from medusa_adapters.bench.coldstart.rows import make_contestants
from medusa_adapters.bench.node import Node
from medusa_adapters.bench.result import Result
from medusa_adapters.bench.served_instance import ServedInstance
from medusa_runtime.errors import ConfigError, MedusaError, MissingPackageError
from medusa_runtime.timeline import Stage

from benchmarks.coldstart import __main__ as command
from benchmarks.coldstart.compiled import Bundled, check_attached, check_nothing_compiled
from benchmarks.coldstart.rows import ROWS
from benchmarks.coldstart.vllm_baselines import STARTS, VllmBaseline

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"
QUESTION = Question(model="m", folder="m", prompt="p", max_tokens=3)

# As much of vLLM as the script asks for: it logs to stdout, and says what it was started with.
VLLM = """
import os, pathlib, tempfile
class SamplingParams:
    def __init__(self, **options): self.options = options
class Output: pass
class LLM:
    def __init__(self, model, **options):
        print("vLLM logs a line")
        os.system("echo and so do its processes")
        cache = pathlib.Path(os.environ["VLLM_CACHE_ROOT"])
        self.said = ["cold", "warm"][cache.exists()] + (" eager" if options.get("enforce_eager") else "")
        self.said += " streamed" if options.get("load_format") == "runai_streamer" else ""
        self.said += " inside" if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else ""
        cache.mkdir(parents=True, exist_ok=True)
        pathlib.Path(tempfile.gettempdir(), "vllm_dist_" + os.urandom(4).hex()).touch()
        if model == "broken": raise SystemExit("no such model")
    def generate(self, prompts, params, use_tqdm):
        answer, request = Output(), Output()
        answer.text, answer.token_ids = (self.said + "...")[: params.options["max_tokens"] * 9], [1]
        request.outputs = [answer]
        return [request] * len(prompts)
"""


@pytest.fixture
def with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    (tmp_path / "runai_model_streamer.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("vllm-default-baseline", ["cold...", "cold..."]),
        ("vllm-warm-cache-baseline", ["cold...", "warm..."]),
        ("vllm-best-baseline", ["cold streamed inside...", "warm streamed inside..."]),
        ("vllm-eager-baseline", ["cold eager...", "warm eager..."]),
    ],
)
def test_each_baseline_starts_vllm_in_its_way(
    name: str, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert set(STARTS) <= set(ROWS)
    (baseline,) = make_contestants([name], ROWS, sys.executable)
    try:
        for text in texts:
            sample = baseline.sample(QUESTION)
            assert sample.text == text
            assert text.startswith(sample.first)
            assert sample.ttft_s > 0
    finally:
        baseline.close()
    assert list(temporary.iterdir()) == [], "vLLM leaves files behind"


@pytest.mark.usefixtures("with_vllm")
def test_a_baseline_that_fails_is_quoted() -> None:
    baseline = VllmBaseline("vllm-eager-baseline", sys.executable)
    try:
        with pytest.raises(MedusaError, match="no such model"):
            baseline.sample(Question("broken", "broken", "p", 1))
    finally:
        baseline.close()


def test_names_and_interpreters_are_checked() -> None:
    with pytest.raises(ConfigError, match="torch-prewarmed"):
        make_contestants(["torch", "tgi"], ROWS)
    with pytest.raises(MissingPackageError, match="/nowhere/python has no vllm"):
        make_contestants(["vllm-cold"], ROWS, "/nowhere/python")


def test_the_same_code_must_give_the_same_text() -> None:
    samples = {"vllm-warm-cache-baseline": [Sample(1.0, "a b")], "vllm-compiled": []}
    samples |= {name: [] for name in ROWS if name not in samples}
    command.check_same_tokens(samples, "vllm-compiled", Sample(1.0, "a b"))
    command.check_same_tokens(samples, "vllm-prewarmed", Sample(1.0, "a c"))  # eager, and rounds otherwise
    with pytest.raises(MedusaError, match="vllm-compiled and vllm-warm-cache-baseline disagree"):
        command.check_same_tokens(samples, "vllm-compiled", Sample(1.0, "a c"))


def test_a_row_that_is_not_measured_gets_no_samples() -> None:
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    command.check_same_tokens(samples, "vllm-prewarmed", Sample(1.0, "a"))
    assert not samples  # an empty row ended --stages


def test_an_eager_start_is_no_compiled_one() -> None:
    check_attached("c", Sample(1.0, stages=(Stage("compiled_attach", "engine", 1, 2, {"functions": 1}),)))
    for stages in ((), (Stage("compiled_attach", "engine", 1, 2, {"left_out": "another source"}),)):
        with pytest.raises(MedusaError, match="another source" if stages else "no cache"):
            check_attached("c", Sample(1.0, stages=stages))


@pytest.fixture
def metrics() -> Iterator[http.server.ThreadingHTTPServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body: bytes = self.server.page  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("page", "said"), [("_total 0", ""), ("_total 2", "found 2"), ("s 0", "found no count")])
def test_one_compilation_ends_the_bench(metrics: http.server.ThreadingHTTPServer, page: str, said: str) -> None:
    metrics.page = f"# HELP\nmedusa_engine_compilations{page}\n".encode()  # type: ignore[attr-defined]
    with ServedInstance(["sleep", "60"], port=metrics.server_port) as instance:
        if not said:
            check_nothing_compiled(instance)
            return
        with pytest.raises(MedusaError, match=said):
            check_nothing_compiled(instance)


def test_a_bundle_that_cannot_be_made_and_a_node_without_its_engine_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    bundled = Bundled([sys.executable, "-c", "import sys; sys.exit('no vLLM here')"], "vllm")
    with pytest.raises(MedusaError, match="no vLLM here"):
        bundled.of(str(tmp_path))
    bundled.close()
    node = Node([sys.executable, "-c", "import sys; sys.exit('no sockets here')"], "vllm")
    with pytest.raises(MedusaError, match="no sockets here"):
        node.wait_warm(str(tmp_path))
    node.close()


def test_promised_ratios_are_told() -> None:
    result = Result({})
    for name, seconds in {"vllm-compiled": 2.0, "vllm-warm-cache-baseline": 15.0, "vllm-cold": 1.0}.items():
        result.add(name, "ttft_s", "s", [seconds])
    (target,) = command.targets(result, "vllm-compiled")
    assert (target.ratio, target.met) == (7.5, False)


@pytest.mark.slow
def test_a_warm_engine_process_serves_the_first_request(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.coldstart", "--model", EXAMPLE]
    flags = ["--rows", "torch-prewarmed,transformers", "--runs", "1", "--max-tokens", "4"]
    ran = subprocess.run(
        [*command, *flags, "--json", tmp_path / "rows.json"],
        cwd=EXAMPLE.parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    rows = {(row["name"], row["metric"]): row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["torch-prewarmed", "ttft_s"]["runs"] == 1
    assert "specialise" in ran.stdout
    assert "transformers to ours pre-warmed" in ran.stdout
