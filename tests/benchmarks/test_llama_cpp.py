"""The row llama.cpp of the cold-start benchmark, with a stand-in for its server: what is timed and compared."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from medusa_adapters.bench.coldstart.contestants import Question
from medusa_adapters.bench.coldstart.sharing import measure_sharing
from medusa_adapters.bench.result import Result
from medusa_runtime.errors import ConfigError, MedusaError, MissingPackageError

from benchmarks import make_gguf
from benchmarks.coldstart.__main__ import origin
from benchmarks.coldstart.llama_cpp import LlamaCpp, llama_cpp
from benchmarks.coldstart.steady import measure_steady

# As much of llama-server as the benchmark asks for: it refuses requests for a while, and answers with the file's text.
SERVER = f"""#!{sys.executable}
import http.server, json, pathlib, sys, time
options = dict(zip(sys.argv[1:], sys.argv[2:]))
said = pathlib.Path(options["--model"]).read_text()
if said == "broken":
    sys.exit("no such format")
ready_at = time.monotonic() + 0.3
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/props":
            return self.answer(200, json.dumps({{"model_ftype": said.split()[0]}}))
        self.answer(200 if time.monotonic() > ready_at else 503, "{{}}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {{"completion_tokens": asked["max_tokens"]}}
        events = [{{"choices": [{{"text": said}}]}}, {{"choices": [], "usage": usage}}]
        lines = [json.dumps(event) for event in events] + ["[DONE]"]
        self.answer(200 if time.monotonic() > ready_at else 503, "".join(f"data: {{line}}\\n\\n" for line in lines))
    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def question(tmp_path: Path) -> Question:
    return Question(str(tmp_path), str(tmp_path), "p", 3)


@contextmanager
def contestant(folder: Path, said: str) -> Iterator[LlamaCpp]:
    server, gguf = folder / "llama-server", folder / "m.gguf"
    server.write_text(SERVER)
    server.chmod(0o755)
    gguf.write_text(said)
    made = llama_cpp(str(server), gguf)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("said", "text"), [("BF16 a b", "BF16 a b"), ("F16 a", "F16 a"), ("Q4_0 a b", "")])
def test_a_start_ends_with_the_first_token_and_quantized_text_is_not_compared(
    said: str, text: str, tmp_path: Path, question: Question
) -> None:
    with contestant(tmp_path, said) as made:
        sample = made.sample(question)
        assert sample.text == text
        assert sample.ttft_s > 0.3
        assert sample.pss_mb


def test_an_origin_needs_curl(tmp_path: Path, question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    far = replace(question, model="s3://bucket/model", env={"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    with contestant(tmp_path, "BF16 first") as made:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(MissingPackageError, match="expected curl"):
            made.sample(far)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_from_an_origin_the_file_is_fetched_before_each_start(tmp_path: Path, question: Question) -> None:
    with contestant(tmp_path, "BF16 first") as made, origin(question, "s3", tmp_path / "m.gguf", counting=False) as far:
        assert made.sample(far).text == "BF16 first"
        (tmp_path / "m.gguf").write_text("BF16 second")
        assert made.sample(far).text == "BF16 second"
        missing = replace(far, env={**far.env, "AWS_ENDPOINT_URL": far.env["AWS_ENDPOINT_URL"] + "/no"})
        with pytest.raises(MedusaError, match="404"):
            made.sample(missing)


def test_throughput_and_memory_of_a_second_instance_are_measured(tmp_path: Path, question: Question) -> None:
    result = Result({})
    with contestant(tmp_path, "BF16 a") as made:
        measure_steady(result, [made], question, tokens=4, runs=1)
        measure_sharing(result, [made], question, runs=1, instances=2)
    assert result.table().count("llama.cpp") == 5


def test_what_is_missing_or_fails_is_said(tmp_path: Path, question: Question) -> None:
    gguf = tmp_path / "m.gguf"
    with pytest.raises(ConfigError, match=r"needs a GGUF file, found none; python -m benchmarks.make_gguf"):
        llama_cpp("llama-server", None)
    with pytest.raises(ConfigError, match=r"found no file .*m.gguf"):
        llama_cpp("llama-server", gguf)
    gguf.touch()
    with pytest.raises(MissingPackageError, match=r"/no/server.*found none"):
        llama_cpp("/no/server", gguf)
    with contestant(tmp_path, "broken") as made, pytest.raises(MedusaError, match="no such format"):
        made.sample(question)


def test_the_converter_is_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_gguf.main(["--llama-cpp", str(tmp_path), "--model", "m", "--out", "o"])
    assert "expected a folder with convert_hf_to_gguf.py" in capsys.readouterr().err


def test_the_converter_is_told_how_our_tokenizer_splits(tmp_path: Path) -> None:
    """The converter of a stand-in for llama.cpp's source writes what it was called with, and what it was told."""
    (tmp_path / "gguf-py").mkdir()
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "__init__.py").touch()
    (tmp_path / "conversion" / "base.py").write_text(
        "class TextModel:\n"
        "    def get_vocab_base_pre(self, tokenizer): raise NotImplementedError\n"
        "    def _set_vocab_gpt2(self): return self.get_vocab_base_pre(None)\n"
    )
    (tmp_path / "conversion" / "llama.py").write_text(
        "from .base import TextModel\n"
        "class LlamaModel(TextModel):\n"
        "    def set_vocab(self): raise ModuleNotFoundError('sentencepiece')\n"
    )
    (tmp_path / "convert_hf_to_gguf.py").write_text(
        "import pathlib, sys\n"
        "from conversion.llama import LlamaModel\n"
        "pathlib.Path(sys.argv[3]).write_text(f'{LlamaModel().set_vocab()} {sys.argv[1]} {sys.argv[4:]}')\n"
    )
    command = [sys.executable, "-m", "benchmarks.make_gguf", "--llama-cpp", tmp_path, "--model", "m", "--out"]
    subprocess.run([*command, tmp_path / "o"], cwd=Path(__file__).parents[2], check=True)
    assert (tmp_path / "o").read_text() == "gpt-2 m ['--outtype', 'bf16']"
