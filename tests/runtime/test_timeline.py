"""The timeline: one record of many processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from medusa_runtime.timeline import Stage, Timeline, process_start_ns


def test_it_does_not_grow_for_ever() -> None:
    timeline = Timeline.create("engine")
    for number in range(9000):
        timeline.mark("adapter", adapter=f"adapter-{number}", text="x" * 100)
    size = os.fstat(timeline.fd).st_size
    assert size < 2 << 20
    timeline.mark("adapter")
    assert os.fstat(timeline.fd).st_size == size
    assert timeline.stages()[0].detail["adapter"] == "adapter-0"  # the start is what it is about


def test_stages_of_several_processes_are_whole_and_in_order() -> None:
    """Processes write at once; no line is lost or torn."""
    timeline = Timeline.create("parent")
    writers = []
    for number in range(4):
        pid = os.fork()
        if not pid:
            child = timeline.named(f"child{number}")
            for count in range(200):
                with child.stage("work", count=count, text="x" * 100):
                    pass
            os._exit(0)
        writers.append(pid)
    for pid in writers:
        assert os.waitpid(pid, 0)[1] == 0
    stages = timeline.stages()
    assert len(stages) == 800
    assert [stage.start_ns for stage in stages] == sorted(stage.start_ns for stage in stages)
    for number in range(4):
        own = [stage.detail["count"] for stage in stages if stage.process == f"child{number}"]
        assert sorted(own) == list(range(200))
    timeline.close()


def test_a_stage_is_kept_when_its_body_raises() -> None:
    timeline = Timeline.create("p")

    def divide() -> None:
        with timeline.stage("divide") as detail:
            detail["by"] = 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        divide()
    (stage,) = timeline.stages()
    assert (stage.name, stage.process, stage.detail) == ("divide", "p", {"by": 0})
    assert stage.end_ns > stage.start_ns
    timeline.close()


def test_a_mark_is_a_moment() -> None:
    timeline = Timeline.create("p")
    before = time.monotonic_ns()
    timeline.mark("ready", tokens=3)
    (stage,) = timeline.stages()
    assert before <= stage.start_ns == stage.end_ns <= time.monotonic_ns()
    assert stage == Stage("ready", "p", stage.start_ns, stage.start_ns, {"tokens": 3})
    timeline.close()


def test_process_start_is_between_exec_and_now() -> None:
    script = "from medusa_runtime.timeline import process_start_ns; print(process_start_ns())"
    before = time.monotonic_ns()
    started = int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    tick_ns = 10**9 // os.sysconf("SC_CLK_TCK")
    assert before - tick_ns <= started <= time.monotonic_ns()
    assert process_start_ns() < before


def test_a_line_that_is_being_written_is_not_read() -> None:
    """A write that crosses a page may be seen in parts; so is this one, but for sure."""
    timeline = Timeline.create("engine")
    timeline.mark("begun")
    timeline.mark("later")
    line = os.pread(timeline.fd, 1 << 16, 0).splitlines(keepends=True)[1]
    os.write(timeline.fd, line[:20])
    assert [stage.name for stage in timeline.stages()] == ["begun", "later"]
    os.write(timeline.fd, line[20:])
    assert [stage.name for stage in timeline.stages()] == ["begun", "later", "later"]
