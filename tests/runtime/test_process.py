"""Reports of child processes to their supervisor, and signals to a child that has just ended."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from contextlib import closing
from pathlib import Path

import pytest
from hanging_files import LOOKUP, HangingFiles
from medusa_runtime.errors import MedusaError
from medusa_runtime.instance.children import Children
from medusa_runtime.process import ReportPipe, abort
from medusa_runtime.timeline import Timeline


@pytest.mark.parametrize("message", ["é" * 2000, "aé" + "é" * 2000, "x" * 3400 + "]" * 1000, "\\" * 4000, "\n" * 4000])
def test_a_long_report_arrives_shortened(message: str) -> None:
    """The process that reads it would end where it is no JSON: the supervisor, or the node agent."""
    with closing(ReportPipe()) as pipe:
        pipe.send("engine", MedusaError(message))
        pipe.send("engine", MedusaError("short"))
        long, short = pipe.read()
    assert message.startswith(long.message.rstrip("…"))
    assert len(long.message) >= 400
    assert short.message == "short"


def test_a_report_by_a_process_with_a_long_name_arrives() -> None:
    with closing(ReportPipe()) as pipe:
        pipe.send("\U0001f40d" * 5000, MedusaError("it failed"))
        (report,) = pipe.read()
    assert report.message == "it failed"
    assert report.process.startswith("\U0001f40d" * 100)


def test_a_signal_to_a_child_whose_end_is_just_being_noted() -> None:
    with closing(ReportPipe()) as pipe:
        children = Children(Timeline.create("test"), pipe)
        children.fork("function", lambda _: 0)
        os.waitpid(children.pid("function"), 0)  # as `reap` does before it forgets the name
        children.stop("function")
        with pytest.raises(ChildProcessError):
            children.reap()


@pytest.mark.root
@pytest.mark.timeout(60)
@pytest.mark.skipif(os.getuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse")
def test_a_child_that_cannot_be_killed_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance whose model was on a file system that hung could not be stopped."""
    monkeypatch.setattr("medusa_runtime.instance.children._END_S", 0.1)
    monkeypatch.setattr("medusa_runtime.instance.children._KILLED_S", 0.3)
    with closing(ReportPipe()) as pipe, HangingFiles(tmp_path) as files:
        files.hang(LOOKUP)
        children = Children(Timeline.create("test"), pipe)
        children.fork("prefetcher", lambda _: len(os.listdir(tmp_path / "file")))
        pid = children.pid("prefetcher")
        while not files.asked:
            os.sched_yield()
        children.close()
    assert f"the prefetcher (process {pid}) was killed and has not ended" in caplog.text
    os.waitpid(pid, 0)


@pytest.mark.parametrize("dumps", [True, False])
def test_a_process_that_aborts_leaves_no_core_dump(dumps: bool, tmp_path: Path) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/", "@")):
        pytest.skip("this machine keeps core dumps elsewhere")
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        os.chdir(tmp_path)
        resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
        (os.abort if dumps else abort)()
    status = os.waitpid(pid, 0)[1]
    assert os.WTERMSIG(status) == signal.SIGABRT
    if dumps and not os.WCOREDUMP(status):
        pytest.skip("this machine makes no core dumps")
    assert os.WCOREDUMP(status) is dumps
