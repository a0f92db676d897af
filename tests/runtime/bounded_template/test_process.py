"""The process that renders chat templates may be killed, stopped or lie. It ends with its parent, and keeps nothing."""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from medusa_runtime.bounded_template import renderer
from medusa_runtime.bounded_template.renderer import RenderingError, TemplateRenderer
from memory_group import MemoryGroup, group
from process_tree import alive
from seccomp import forbid
from waiting import until

__all__ = ["group"]

_PIDFD_OPEN = 434  # on all processors
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Starts a renderer beside a file and a socket, and prints its process id.
_PARENT = """
import os, resource, signal, socket, sys, time
from pathlib import Path
from medusa_runtime.bounded_template import renderer
from medusa_runtime.bounded_template.renderer import RenderingError, template_renderer
from medusa_runtime.errors import LimitError
listener, file = socket.create_server(("127.0.0.1", 0)), open(sys.executable, "rb")
os.set_inheritable(listener.fileno(), True)
os.dup2(file.fileno(), 150)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if sys.argv[1] == "fork":
    template_renderer().start(fork=True)
assert template_renderer().render("{{ a }}", {"a": 1}) == "1"
"""
_REST = {
    "wait": "print(template_renderer()._process.pid, flush=True); time.sleep(600)",
    # Another process, whose parent uses the renderer at the same time.
    "child": """
if not os.fork():
    assert all(template_renderer().render("{{ a }}", {"a": i}) == str(i) for i in range(200))
    os._exit(7)
assert all(template_renderer().render("{{ a }}", {"a": -i}) == str(-i) for i in range(200))
print(os.waitstatus_to_exitcode(os.wait()[1]))
""",
    # One that becomes another user, and so may not end a process that it has forked before.
    "user": """
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
renderer._WALL_FACTOR = 0.1
try:
    template_renderer().render("{% for i in range(99999) %}{% for j in range(300) %}{% endfor %}{% endfor %}mine", {})
except RenderingError as error:
    print(error)
renderer._WALL_FACTOR = 20
try:
    print(template_renderer().render("theirs", {}))
except PermissionError as error:  # of a folder that only root may read
    print("theirs" if error.filename == sys.executable else error)
""",
    # One that has waited for all children. Another one has the process's number by now.
    "reuse": """
pid = template_renderer()._process.pid
os.kill(pid, signal.SIGKILL)
assert os.wait()[0] == pid
for _ in range(100):
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    if (other := os.posix_spawn("/bin/sleep", ["sleep", "600"], {})) == pid:
        break
    os.kill(other, signal.SIGKILL)
    os.wait()
else:
    sys.exit("no process got the number")
template_renderer().close()
assert template_renderer().render("{{ a }}", {"a": 2}) == "2"
print(os.waitpid(other, os.WNOHANG))
os.kill(other, signal.SIGKILL)
""",
    # A sandbox without pidfd_open(2).
    "sandbox": """
killed = template_renderer()._process.pid
try:
    os.pidfd_open(killed)
except OSError as error:
    print(error.strerror)
os.kill(killed, signal.SIGSTOP)
print(template_renderer().render("{{ a }}", {"a": 2}))
template_renderer().close()
assert not os.path.exists(f"/proc/{killed}")
print(template_renderer().render("{{ a }}", {"a": 3}))
""",
    # One in a container with too little memory for what the template may take.
    "memory": """
try:
    template_renderer().render("{{ ('a' * 200000000)|length }}", {})
except LimitError as error:
    print(error)
print(template_renderer().render("{{ a }}", {"a": 2}))
""",
    "small": """
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    template_renderer().render("{{ a }}", {"a": "a" * 200_000})
except LimitError as error:
    print(error)
print(template_renderer().render("{{ a }}", {"a": 2}))
""",
}


@pytest.fixture
def templates() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    assert renderer.render("{{ a }}", {"a": 1}) == "1"
    yield renderer
    renderer.close()


def pid_of(templates: TemplateRenderer) -> int:
    assert templates._process is not None
    return templates._process.pid


def test_one_that_was_killed_is_replaced(templates: TemplateRenderer) -> None:
    killed = pid_of(templates)
    os.kill(killed, signal.SIGKILL)
    until(lambda: not alive(killed))
    assert templates.render("{{ a }}", {"a": 2}) == "2"
    assert pid_of(templates) != killed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_one_that_is_killed_while_it_renders_costs_one_error(
    number: signal.Signals, templates: TemplateRenderer
) -> None:
    timer = threading.Timer(0.2, os.kill, (pid_of(templates), number))
    timer.start()
    with pytest.raises(RenderingError, match=rf"ended the process that renders it \({number.name}\); send less"):
        templates.render(SLOW, {})
    timer.join()
    assert templates.render("{{ a }}", {"a": 2}) == "2"


def test_one_that_was_stopped_goes_on(templates: TemplateRenderer) -> None:
    stopped = pid_of(templates)
    os.kill(stopped, signal.SIGSTOP)
    assert templates.render("{{ a }}", {"a": "b" * 1_000_000}) == "b" * 1_000_000
    assert pid_of(templates) == stopped


def test_one_that_is_stopped_again_and_again_is_given_up(
    templates: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "CPU_S", 1)
    monkeypatch.setattr(renderer, "_WALL_FACTOR", 2)  # each time it goes on, it may run until `stop` gets a CPU again
    stopped = pid_of(templates)
    ended = threading.Event()

    def stop() -> None:
        while not ended.wait(0.0001):
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(RenderingError, match="was not rendered within 2 s, on this busy machine; try again"):
            templates.render(SLOW, {})
    finally:
        ended.set()
        thread.join()
    assert templates.render("{{ a }}", {"a": 2}) == "2"


@pytest.mark.parametrize("answer", [b"", b"\0", struct.pack("<?Q", False, 1), struct.pack("<?Q", False, 1 << 62)])
def test_an_answer_may_be_any_bytes(answer: bytes, templates: TemplateRenderer) -> None:
    assert templates._process is not None
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with templates._process.connection, ours, theirs:
        templates._process.connection = ours
        theirs.send(answer)
        if answer.endswith(b"@"):  # it has so many bytes: they cannot be more than the file has
            assert templates.render("ö", {}) == "ö{}"
        else:
            with pytest.raises(RenderingError, match="ended the process that renders it"):
                templates.render("ö", {})
            assert templates.render("{{ a }}", {"a": 2}) == "2"


def test_threads_share_it_and_wait_for_no_long_rendering(templates: TemplateRenderer) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda number: templates.render("{{ a }}", {"a": number}), range(500))
        assert list(found) == [str(number) for number in range(500)]
        slow = pool.submit(templates.render, SLOW, {})
        until(templates._turn.locked)
        assert templates.render("{{ a }}", {"a": 2}) == "2"
        assert not slow.done()
        with pytest.raises(RenderingError, match="took more than 3 s"):
            slow.result()


def test_threads_that_wait_for_a_process_of_their_own_take_their_turn_meanwhile(
    templates: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "CPU_S", 1)
    for _ in range(renderer._MOST_OTHERS):
        templates._others.acquire()
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(templates.render, SLOW, {})
        until(templates._turn.locked)
        try:
            assert pool.submit(templates.render, "{{ a }}", {"a": 2}).result(60) == "2"
        finally:
            for _ in range(renderer._MOST_OTHERS):
                templates._others.release()
        with pytest.raises(RenderingError, match="took more than 1 s"):
            slow.result()


def test_threads_that_wait_for_many_short_renderings_get_no_process(
    templates: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "_TURN_S", 0.01)
    with ThreadPoolExecutor(1) as pool:
        with templates._turn:
            templates._began_s = math.inf  # the next one always begins
            waiting = pool.submit(templates.render, "{{ a }}", {"a": 2})
            time.sleep(1)
            assert not waiting.done()
        assert waiting.result() == "2"


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_it_ends_with_its_parent_and_has_none_of_its_files_signals_and_secrets(how: str) -> None:
    environ = {**os.environ, "AWS_SECRET_ACCESS_KEY": "private"}
    command = [sys.executable, "-c", _PARENT + _REST["wait"], how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        try:
            pid = int(parent.stdout.readline())
            assert {each.name for each in Path(f"/proc/{pid}/fd").iterdir()} == {"0", "1", "2"}
            if how == "spawn":
                assert "private" not in Path(f"/proc/{pid}/environ").read_text()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
            time.sleep(0.1)
            assert alive(pid)
        finally:
            parent.kill()
        until(lambda: not alive(pid))


def test_a_stopped_one_ends_with_the_process_that_forked_it() -> None:
    command = [sys.executable, "-c", _PARENT + _REST["wait"], "fork"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    try:
        until(lambda: not alive(pid))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_closing_it_ends_a_rendering(templates: TemplateRenderer) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(templates.render, SLOW, {})
        until(templates._turn.locked)
        time.sleep(0.2)
        templates.close()
        with pytest.raises(RenderingError, match="ended the process that renders it"):
            slow.result()
    assert templates.render("{{ a }}", {"a": 2}) == "2"


def test_a_rendering_ends_when_its_check_raises(templates: TemplateRenderer) -> None:
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyError("left")

    rendering = pid_of(templates)
    with pytest.raises(KeyError, match="left"):
        templates.render(SLOW, {}, check=check)
    assert not alive(rendering)
    assert templates.render("{{ a }}", {"a": 2}) == "2"


def test_one_that_waits_for_its_turn_is_given_up_when_its_check_raises(templates: TemplateRenderer) -> None:
    def check() -> None:
        raise KeyError("left")

    for _ in range(renderer._MOST_OTHERS):
        templates._others.acquire()
    with templates._turn, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(templates.render, "{{ a }}", {"a": 2}, check=check)
        with pytest.raises(KeyError, match="left"):
            waiting.result()


@pytest.mark.root
def test_no_other_process_that_has_got_its_number_is_killed() -> None:
    command = [sys.executable, "-c", _PARENT + _REST["reuse"], "fork"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "(0, 0)\n", done.stderr


def test_it_is_ended_by_its_number_where_the_kernel_gives_no_descriptor_of_it() -> None:
    command = [sys.executable, "-c", _PARENT + _REST["sandbox"], "fork"]
    without = partial(forbid, _PIDFD_OPEN, errno.ENOSYS)
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=without)
    assert done.stdout == f"{os.strerror(errno.ENOSYS)}\n2\n3\n", done.stderr


@pytest.mark.root
@pytest.mark.parametrize("group", [120], indirect=True)
def test_the_lack_of_memory_is_told_from_the_templates_own_limit(group: MemoryGroup) -> None:
    command = [*group.inside, sys.executable, "-c", _PARENT + _REST["memory"], "fork"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = "a chat template could not be rendered: memory ran out, the limit is 0.12 GB\n2\n"
    assert done.stdout == expected, done.stderr
    assert group.kills() == 1


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_process_that_its_parent_forks_has_another_one(how: str) -> None:
    command = [sys.executable, "-c", _PARENT + _REST["child"], how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "7\n", done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_after_a_change_of_user_no_rendering_gets_the_text_of_one_that_was_given_up() -> None:
    command = [sys.executable, "-c", _PARENT + _REST["user"], "fork"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "was not rendered within 0.3 s, on this busy machine; try again\ntheirs\n", done.stderr


def test_values_that_no_file_may_hold_are_refused() -> None:
    command = [sys.executable, "-c", _PARENT + _REST["small"], "fork"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "no file may be larger than 97 kB (ulimit -f); raise that\n2\n", done.stderr


def test_a_text_that_no_file_may_hold_is_not_cut(templates: TemplateRenderer) -> None:
    resource.prlimit(pid_of(templates), resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(RenderingError, match="makes a text for which there is no room; raise ulimit -f"):
        templates.render("{{ 'a' * 200000 }}", {})
    assert templates.render("{{ 'a' * 200000 }}", {}) == "a" * 200_000
