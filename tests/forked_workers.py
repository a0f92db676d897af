"""``pytest --workers 4`` runs tests in four processes, forked when all tests are collected.

So the tests are collected once, and what they have imported is imported once. A worker takes a file after the other;
when no whole file is left it takes half of what another one has left.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count, groupby
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

# What tests of many files import while they run.
SHARED_IMPORTS = ("transformers.models.llama.modeling_llama",)
CRASHED = 70  # a worker's exit status when it failed outside of a test
FOLDER = "forked-worker-"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run tests in N forked processes")


def pytest_configure() -> None:
    _end_at_sigterm()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    option = session.config.option
    if not option.workers or option.collectonly or session.testsfailed or len(session.items) < 2:
        return None  # pytest's own loop
    if len(session.items) > 1000:
        for name in SHARED_IMPORTS:
            __import__(name)
    return Workers(session, option.workers).run()


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of this run, which all workers have in common."""
    folder = factory.getbasetemp()
    return folder.parent if folder.name.startswith(FOLDER) else folder


class Workers:
    """The processes and the files that none of them has begun."""

    def __init__(self, session: pytest.Session, wanted: int) -> None:
        self._session = session
        self._files = deque(deque(numbers) for numbers in _by_file(session.items))
        self._numbers = count()
        self._workers: list[Worker] = []
        self._wanted = min(wanted, len(session.items))

    def run(self) -> bool:
        self._session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
        try:
            while len(self._workers) < self._wanted:
                self._start()
            while self._workers:
                ready = wait([end for worker in self._workers for end in (worker.connection, worker.pidfd)])
                for worker in tuple(self._workers):
                    if worker.connection in ready or worker.pidfd in ready:
                        self._attend(worker, has_ended=worker.pidfd in ready)
        finally:  # at Ctrl-C they end what they have started
            for worker in self._workers:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGINT)
            for worker in self._workers:
                worker.close()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)
        return True

    def _start(self) -> None:
        others = [worker.connection for worker in self._workers]
        self._workers.append(Worker(self._session, next(self._numbers), others))

    def _attend(self, worker: Worker, has_ended: bool) -> None:
        config = self._session.config
        while worker.connection.poll():
            try:
                kind, content = worker.connection.recv()
            except EOFError:
                break
            if kind == "report":
                report = config.hook.pytest_report_from_serializable(config=config, data=content)
                config.hook.pytest_runtest_logreport(report=report)
            else:
                worker.running, worker.ahead = content, self._next(worker)
                with suppress(BrokenPipeError):
                    worker.connection.send(worker.ahead)
        if has_ended:
            self._workers.remove(worker)
            self._end(worker)

    def _next(self, worker: Worker) -> int | None:
        if self._session.shouldfail or self._session.shouldstop:
            return None
        if not worker.rest and self._files:
            worker.rest = self._files.popleft()
        if not worker.rest:
            most = max((other.rest for other in self._workers), key=len)
            worker.rest = deque(most.pop() for _ in range((len(most) + 1) // 2))
            worker.rest.reverse()
        return worker.rest.popleft() if worker.rest else None

    def _end(self, worker: Worker) -> None:
        """Report the test that ended a worker, and let another worker go on with what is left."""
        status = worker.close()
        if status == 0:
            return
        if worker.ahead is not None:
            worker.rest.appendleft(worker.ahead)
        if worker.rest:
            self._files.appendleft(worker.rest)
        if worker.running is not None:
            item = self._session.items[worker.running]
            text = f"the worker that ran it ended with status {status}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
        else:
            self._session.shouldstop = f"a worker ended outside of a test, with status {status}"
        if not self._session.shouldstop:
            self._start()


class Worker:
    """One forked process, as the process that collected sees it."""

    def __init__(self, session: pytest.Session, number: int, others: list[Connection]) -> None:
        self.rest: deque[int] = deque()  # of the file that it is at
        self.running: int | None = None  # the test that it began last
        self.ahead: int | None = None  # the one that comes after it
        sys.stdout.flush()
        sys.stderr.flush()
        self.connection, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for connection in (*others, self.connection):
                connection.close()
            _work(session, number, theirs)
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)

    def close(self) -> int:
        """Wait until it has ended; its exit status, negative for a signal."""
        self.connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.pidfd)
        return status


def _by_file(items: list[pytest.Item]) -> Iterator[list[int]]:
    for _, numbers in groupby(range(len(items)), key=lambda number: items[number].path):
        yield list(numbers)


def _work(session: pytest.Session, number: int, connection: Connection) -> None:
    """Run the tests that ``connection`` names, and end the process."""
    status = CRASHED
    try:
        _become_worker(session.config, number)
        session.config.pluginmanager.register(Reporting(connection), "reporting")
        _run_given(session, connection)
        status = 0
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C comes from there and from our parent
        status = pytest.ExitCode.INTERRUPTED
    except BaseException:  # noqa: BLE001 - it must not go on as a second pytest
        traceback.print_exc()
    finally:
        try:
            session._setupstate.teardown_exact(None)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_given(session: pytest.Session, connection: Connection) -> None:
    def ask(begun: int | None) -> int | None:
        connection.send(("begins", begun))
        following: int | None = connection.recv()
        return following

    number = ask(None)
    while number is not None:
        following = ask(number)
        item = session.items[number]
        nextitem = None if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        number = following


def _become_worker(config: pytest.Config, number: int) -> None:
    """Give this process what it must not share with the others."""
    capturing: Any = config.pluginmanager.getplugin("capturemanager")
    capturing.stop_global_capturing()
    capturing.start_global_capturing()
    capturing.suspend_global_capture()
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"{FOLDER}{number}"
    factory._basetemp.mkdir(mode=0o700)
    _end_at_sigterm()


class Reporting:
    """Runs a test as pytest does, and sends its reports instead of showing them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            self._connection.send(("report", data))
        return True


def _end_at_sigterm() -> None:
    signal.signal(signal.SIGTERM, partial(_end, os.getpid()))


def _end(tests: int, number: int, frame: FrameType | None) -> None:
    """End the tests at SIGTERM as at Ctrl-C, through the fixtures that end what was started."""
    if os.getpid() == tests:
        signal.default_int_handler(number, frame)
    signal.signal(number, signal.SIG_DFL)  # in a process that a test has forked
    os.kill(os.getpid(), number)
