"""Running the processes that capture graphs offline. What they do has tests of its own."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu import graph_capture
from medusa_runtime.engine.torch.engine import TorchEngine
from medusa_runtime.errors import EngineError
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints

sys.path.insert(0, str(Path(__file__).parents[2] / "state/graphs"))

from small_graph import GRAPH, WHOLE


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """``PYTHON`` in ``tmp_path`` takes the place of the interpreter."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "PYTHON"))
    return Settings(model="m")


def python(folder: Path, script: str) -> None:
    (folder / "PYTHON").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "PYTHON").chmod(0o755)


def test_it_is_told_what_to_do(settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    python(tmp_path, 'echo "$@"; cat >&2')
    with caplog.at_level(logging.INFO):
        graph_capture.run(settings, tmp_path / "out", tmp_path / "other", check=True)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"-m medusa_runtime.engine.gpu.graph_capture {tmp_path}/out {tmp_path}/other check"
    assert '"model": "m"' in said[1]


def test_a_failure_says_how_it_ended(settings: Settings, tmp_path: Path) -> None:
    python(tmp_path, "echo no device >&2; exit 3")
    with pytest.raises(EngineError, match=r"^capturing CUDA graphs failed: no device$"):
        graph_capture.run(settings, tmp_path / "out")


def test_one_that_never_ends_is_ended(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph_capture, "_TIMEOUT_S", 1.0)
    python(tmp_path, "echo capturing; exec sleep 1000")
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(EngineError, match=r"^capturing CUDA graphs failed: it was not done after 1 s: capturing$"),
    ):
        graph_capture.run(settings, tmp_path / "out")
    assert "capturing" in caplog.messages, "what it said until then"


def test_an_interrupt_leaves_no_process_and_no_timer(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that was interrupted would not end before the timer does."""

    def interrupt(record: logging.LogRecord) -> bool:
        raise KeyboardInterrupt

    python(tmp_path, f"echo $$ > {tmp_path}/pid; echo capturing; exec sleep 1000")
    monkeypatch.setattr(graph_capture.logger, "filters", [interrupt])
    monkeypatch.setattr(graph_capture.logger, "level", logging.INFO)
    with pytest.raises(KeyboardInterrupt):
        graph_capture.run(settings, tmp_path / "out")
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_one_that_hangs_says_where(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_capture, "_TIMEOUT_S", 5.0)
    real = Path(sys.prefix) / "bin/python"
    os.mkfifo(tmp_path / "never")
    python(tmp_path, f'exec {real} "$@" <> {tmp_path}/never')

    def capture(engine: str) -> None:
        message = r"it was not done after 5 s: (.*\n)*.*graph_capture.py\", line \d+ in main"
        with pytest.raises(EngineError, match=message):
            graph_capture.run(replace(settings, engine=engine), tmp_path / f"out-{engine}")

    with ThreadPoolExecutor() as pool:  # both wait at the same time
        list(pool.map(capture, ["torch", "vllm"]))


def test_an_error_is_one_line(settings: Settings, tmp_path: Path) -> None:
    python(tmp_path, f'exec {sys.prefix}/bin/python "$@"')
    with pytest.raises(EngineError) as failed:
        graph_capture.run(replace(settings, engine="vllm", model=f"{tmp_path}/away"), tmp_path / "out")
    assert "Traceback" not in str(failed.value)
    assert str(failed.value).endswith(f"\n{tmp_path}/away: expected a folder with a checkpoint, found nothing")


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_third_process_checks_what_two_have_made(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr("medusa_runtime.device.choice.choose", lambda device, environ: "cuda")
    python(tmp_path, f'shift 2; echo "$@" >> {tmp_path}/said; echo of "$2" > "$1"')
    out = graph_capture.capture("m", replace(settings, engine=engine), tmp_path)
    assert out is not None
    second, unchecked = tmp_path / "second.dump", tmp_path / "unchecked"
    assert (tmp_path / "said").read_text().splitlines() == [
        f"{second}", f"{unchecked} {second}", f"{out} {unchecked} check"
    ]  # fmt: skip
    assert out.read_text() == f"of {unchecked}\n"


@pytest.fixture
def broken(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The check of the blueprints in ``made`` ends without a result, and a later one fails if any is pinned."""
    monkeypatch.setattr("medusa_runtime.device.choice.choose", lambda device, environ: "cuda")
    script = """
import sys
from pathlib import Path
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import Blueprints
unchecked = decode_blueprints(Path(sys.argv[2]).read_bytes())
if any(graph.pinned for graph in unchecked.graphs) or "other" in unchecked.refused:
    sys.exit("the context broke")
save_blueprints(unchecked, Path(sys.argv[1]))
"""
    (tmp_path / "check.py").write_text(script)
    start = f'shift 2; [ "$3" ] || {{ cp {tmp_path}/made "$1"; exit 0; }}; echo once more >> {tmp_path}/said'
    python(tmp_path, f'{start}; exec {sys.prefix}/bin/python {tmp_path}/check.py "$@"')
    return settings


def test_a_check_that_breaks_the_context_is_done_again_without_pinned_graphs(
    broken: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pinned, other = replace(GRAPH, key="pinned", pinned=(1,)), replace(GRAPH, key="free")
    save_blueprints(replace(WHOLE, graphs=(pinned, other)), tmp_path / "made")
    out = graph_capture.capture("m", broken, tmp_path)
    assert out is not None
    checked = decode_blueprints(out.read_bytes())
    assert [graph.key for graph in checked.graphs] == ["free"]
    why = "address: two captures do not explain it, and the process that replayed such graphs ended"
    assert checked.refused == {"pinned": why}
    assert "1 CUDA graphs that two captures do not explain are left out: checking the" in caplog.text
    assert (tmp_path / "said").read_text() == "once more\n" * 2


def test_if_many_graphs_break_the_context_all_pinned_ones_are_left_out(
    broken: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each check is a start of the engine, so a model with hundreds of such graphs must not have as many."""
    script = """
import sys
from pathlib import Path
from medusa_runtime.engine.gpu.attempts import Attempts
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import Blueprints
out, unchecked = map(Path, sys.argv[1:3])
attempts = Attempts(out.with_name("attempts"))
checked = attempts.without_ended(decode_blueprints(unchecked.read_bytes()))
for graph in checked.graphs:
    with attempts.trying("check", graph.key):
        if graph.pinned:
            sys.exit("the context broke")
save_blueprints(checked, out)
"""
    (tmp_path / "check.py").write_text(script)
    pinned = [replace(GRAPH, key=f"pinned {number}", pinned=(1,)) for number in range(9)]
    save_blueprints(replace(WHOLE, graphs=(*pinned, replace(GRAPH, key="free"))), tmp_path / "made")
    out = graph_capture.capture("m", broken, tmp_path)
    assert out is not None
    checked = decode_blueprints(out.read_bytes())
    assert [graph.key for graph in checked.graphs] == ["free"]
    assert len(checked.refused) == 9
    assert "9 CUDA graphs that two captures do not explain are left out: checking the" in caplog.text
    assert (tmp_path / "said").read_text() == "once more\n" * 6


@pytest.mark.parametrize(("pinned", "checks"), [((), 1), ((1,), 2)])
def test_a_check_that_fails_without_pinned_graphs_is_an_error(
    broken: Settings, tmp_path: Path, pinned: tuple[int, ...], checks: int
) -> None:
    save_blueprints(replace(WHOLE, graphs=(replace(GRAPH, pinned=pinned),), refused={"other": ""}), tmp_path / "made")
    expected = r"^checking the materialized CUDA graphs failed: the context broke$"
    with pytest.raises(EngineError, match=expected):
        graph_capture.capture("m", broken, tmp_path)
    assert (tmp_path / "said").read_text() == "once more\n" * checks


def test_an_engine_that_captures_nothing_is_closed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, it loads the model, and has no graphs."""
    closed, close = [], TorchEngine.close
    monkeypatch.setattr(TorchEngine, "close", lambda engine: closed.append(close(engine)))
    settings = Settings(model=str(checkpoint), device="cpu", state="none")
    with (
        pytest.raises(EngineError, match="this model's decode steps cannot be captured"),
        graph_capture._loaded(settings, None),  # type: ignore[arg-type]
    ):
        pass
    assert closed == [None]


def test_an_engine_that_cannot_be_closed_hides_no_error() -> None:
    """If the CUDA context is broken, closing fails, too."""

    class Broken:
        def close(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(EngineError, match="a graph broke it"), graph_capture.closed_after(Broken()):
        raise EngineError("a graph broke it")
    with pytest.raises(RuntimeError), graph_capture.closed_after(Broken()):
        pass


@pytest.mark.parametrize("arguments", [["OUT"], ["OUT", "OTHER", "check"]], ids=["captures", "checks"])
def test_torch_is_imported_as_engines_import_it(arguments: list[str], tmp_path: Path) -> None:
    """Without a GPU it gets no further than that."""
    script = """
import contextlib, sys
from medusa_runtime.engine.gpu import graph_capture
with contextlib.suppress(Exception, SystemExit):
    graph_capture.main(sys.argv[1:])
print(type(sys.modules["torch.fx"]).__name__)
"""
    given = json.dumps(asdict(Settings(model="m", device="cuda", torch_import="lean")))
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        input=given, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "LazyModule", done.stderr
