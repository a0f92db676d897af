"""Children of a node server: followed, started again, and gone with it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from medusa_cluster.node.processes.child import Child, RestartingChild, message_of
from process_tree import alive, descendants
from waiting import until

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
# It starts a process in a session of its own, which outlives it.
PARENT = [
    sys.executable,
    "-c",
    textwrap.dedent("""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(60)
    """),
]


def until_gone(*pids: int) -> None:
    until(lambda: not any(map(alive, pids)), lambda: [pid for pid in pids if alive(pid)])


async def line_of(child: Child) -> str:
    while not child.last_lines:
        await asyncio.sleep(0.02)
    return child.last_lines[0]


def test_a_process_that_cannot_be_watched_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[int] = []

    def refuse(pid: int) -> int:
        watched.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    async def run() -> None:
        monkeypatch.setattr(os, "pidfd_open", refuse)  # not before: a loop calls it when it is made
        with pytest.raises(OSError, match="Too many open files"):
            Child(SLEEP, os.environ, tmp_path / "log")

    asyncio.run(run())
    until_gone(*watched)
    assert len(watched) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("INFO: fetching", "INFO: fetching"),
        ('{"level": "info", "message": "listening on http://h:1"}', "listening on http://h:1"),
        ('{"message": "no model", "code": "Config.Invalid"}', "medusa: no model [Config.Invalid]"),
        ("{no JSON", "{no JSON"),
        ("{}", "{}"),
        ("{" * 4096, "{" * 4096),
    ],
)
def test_a_line_of_json_says_its_message(line: str, said: str) -> None:
    assert message_of(line) == said


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("", "it said nothing"),
        ("INFO: one\n\n", "INFO: one"),
        ("medusa: no model [Config.Invalid]\nINFO: gone\n", "medusa: no model [Config.Invalid]"),
        ('{"message": "no model", "code": "A.B"}\n{"message": "gone"}\n', "medusa: no model [A.B]"),
    ],
)
def test_its_last_words_are_its_error_or_its_last_line(tmp_path: Path, printed: str, words: str) -> None:
    async def run() -> None:
        child = Child([sys.executable, "-c", f"print({printed!r}, end='')"], os.environ, tmp_path / "log")
        await child.wait()
        await child.read_rest(10)
        assert child.last_words == words

    asyncio.run(run())


def test_its_lines_and_its_status_are_known(tmp_path: Path) -> None:
    lines: list[str] = []

    async def run() -> int:
        code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
        child = Child([sys.executable, "-c", code], os.environ, tmp_path / "log", lines.append)
        assert child.status is None
        return await child.wait()

    assert asyncio.run(run()) == 3
    assert sorted(lines) == ["one", "two"]
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "two"]


def test_a_last_line_without_an_end_is_known(tmp_path: Path) -> None:
    lines: list[str] = []

    async def run() -> None:
        code = "import sys; sys.stderr.write('first\\nno end')"
        child = Child([sys.executable, "-c", code], os.environ, tmp_path / "log", lines.append)
        await child.wait()
        await child.read_rest(10)
        assert list(child.last_lines) == lines

    asyncio.run(run())
    assert lines == ["first", "no end"]


def test_what_its_own_children_say_after_its_end_is_read(tmp_path: Path) -> None:
    async def run() -> None:
        child = Child(["sh", "-c", "(sleep 0.5; echo late) & exit 3"], os.environ, tmp_path / "log")
        assert await child.wait() == 3
        await child.read_rest(0.05)
        assert not child.last_lines, "it waits no longer than it is told"
        await child.read_rest(20)
        assert list(child.last_lines) == ["late"]

    asyncio.run(run())
    assert (tmp_path / "log").read_text() == "late\n"


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"

    async def run() -> int:
        child = Child([sys.executable, "-c", code], os.environ, tmp_path / "log")
        await line_of(child)
        return await child.end(0.2)

    assert asyncio.run(run()) == -signal.SIGKILL


def test_one_that_is_kept_alive_is_started_again(tmp_path: Path) -> None:
    ended: list[int | None] = []

    async def run() -> None:
        async def on_end(child: Child) -> None:
            ended.append(child.status)

        kept = RestartingChild(lambda: Child(SLEEP, os.environ, tmp_path / "log"), on_end)
        kept.begin()
        while kept.child is None:
            await asyncio.sleep(0.02)
        first = kept.child
        await line_of(first)
        first.kill()
        while kept.starts < 2:
            await asyncio.sleep(0.02)
        await kept.end(1.0)
        assert kept.child is not first
        assert not alive(kept.child.pid)

    asyncio.run(run())
    assert ended == [-signal.SIGKILL]


def test_a_child_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import asyncio, os
        from pathlib import Path
        from medusa_cluster.node.processes.child import Child

        async def run():
            child = Child({SLEEP!r}, os.environ, Path({str(tmp_path / "log")!r}))
            while not child.last_lines:
                await asyncio.sleep(0.02)
            print(child.pid, flush=True)
            await child.wait()

        asyncio.run(run())
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        until_gone(pid)


def _guarded(*command: str) -> subprocess.Popen[str]:
    guard = [sys.executable, "-m", "medusa_cluster.node.processes.guard", *command]
    return subprocess.Popen(guard, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("victim", ["guard", "command"])
def test_a_guard_ends_all_that_its_command_started(victim: str) -> None:
    with _guarded(*PARENT) as guard:
        assert guard.stdout
        orphan = int(guard.stdout.readline())
        command = next(pid for pid in descendants(guard.pid) if pid != orphan)
        os.kill(guard.pid if victim == "guard" else command, signal.SIGTERM)
        assert guard.wait(120) == 128 + signal.SIGTERM
        until_gone(orphan, command)


def test_a_guard_ends_all_when_its_parent_is_killed() -> None:
    code = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "medusa_cluster.node.processes.guard", *{PARENT!r}]).wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        orphan = int(parent.stdout.readline())
        pids = descendants(parent.pid)
        parent.kill()
        until_gone(orphan, *pids)


def test_a_guard_gives_no_time_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Its command gets no SIGTERM: it might be killed in the midst of what it does then."""
    asked = tmp_path / "asked"
    command = f"trap 'touch {asked}' TERM; echo up; while :; do sleep 0.1; done"
    guard = [sys.executable, "-m", "medusa_cluster.node.processes.guard", "sh", "-c", command]
    code = f"import subprocess; subprocess.Popen({guard!r}).wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "up\n"
        pids = descendants(parent.pid)
        parent.kill()
        until_gone(*pids)
    assert not asked.exists()


def test_a_guard_passes_the_status_on() -> None:
    with _guarded(sys.executable, "-c", "import sys; sys.exit(7)") as guard:
        assert guard.wait(120) == 7


def test_one_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    async def run() -> None:
        folder = tmp_path / "logs"
        kept = RestartingChild(lambda: Child(SLEEP, os.environ, folder / "log"))
        kept.begin()
        await asyncio.sleep(0.05)
        assert kept.child is None
        folder.mkdir()
        async with asyncio.timeout(20):
            while kept.child is None:
                await asyncio.sleep(0.02)
        await line_of(kept.child)
        await kept.end(1.0)

    asyncio.run(run())
