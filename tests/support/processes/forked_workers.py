"""Workers of pytest-xdist that are forked from its controller, which has imported the tests and what they import.

Otherwise each worker imports the tests, torch, transformers and many other packages, for ten seconds. xdist starts its
workers through execnet, which here finds them forked already: they have to be forked before the controller has threads.
A worker that replaces a crashed one is started plainly.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from _pytest import outcomes
from _pytest.pathlib import import_path
from medusa_runtime.imports.gc_paused import gc_paused

# What tests import only when they run, and in many folders.
MODULES = (
    "openai",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)


def fork_workers(count: int, tests: Path, chosen: Sequence[Path] = (), *, modules: Sequence[str] = MODULES) -> None:
    """Fork the next ``count`` processes that execnet will start, once ``modules`` and ``tests`` are imported.

    If some files or folders in ``tests`` are ``chosen``, only these are imported, and the conftests above them.
    """
    from execnet import gateway_base, gateway_io

    with gc_paused(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import(modules, tests, chosen or [tests])
        gc.freeze()
    forked: list[ForkedWorker] = []
    for _ in range(count):
        forked.append(ForkedWorker(forked))

    class Master(gateway_io.Popen2IOMaster):
        def __init__(self, arguments: list[str], execmodel: Any) -> None:
            if forked:
                self.popen = forked.pop(0)
                gateway_base.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)
            else:
                super().__init__(arguments, execmodel)

    gateway_io.Popen2IOMaster = Master


def _import(modules: Sequence[str], tests: Path, chosen: Sequence[Path]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as the tests do that import transformers
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    paths = {tests / "conftest.py"}
    for one in chosen:
        paths |= {
            one,
            *one.rglob("*.py"),
            *(folder / "conftest.py" for folder in one.parents if tests in folder.parents),
        }
    found = [path for path in paths if path.is_file() and (path.name == "conftest.py" or path.name.startswith("test_"))]
    for path in sorted(found, key=lambda path: (path.parent, path.name != "conftest.py", path.name)):
        try:
            import_path(path, mode="importlib", root=tests.parent, consider_namespace_packages=False)
        except (Exception, outcomes.Skipped):  # noqa: BLE001 - each worker tries again, and says so
            for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", "") == str(path)]:
                del sys.modules[name]


class ForkedWorker:
    """What execnet uses of the ``subprocess.Popen`` of an interpreter that executes the line which it reads."""

    def __init__(self, before: Sequence[ForkedWorker]) -> None:
        (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for worker in before:  # or they would not see when the controller ends
                worker.stdin.close()
                worker.stdout.close()
            os.close(stdin)
            os.close(stdout)
            _work(their_stdin, their_stdout)
        os.close(their_stdin)
        os.close(their_stdout)
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _work(stdin: int, stdout: int) -> NoReturn:
    """Execute execnet's line, and end as an interpreter does."""
    for number, theirs in enumerate((stdin, stdout)):
        os.dup2(theirs, number)
        os.close(theirs)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), sys.__stderr__
    status = 1
    try:
        with open(0, "rb", buffering=0, closefd=False) as pipe:
            if line := pipe.readline():  # else no worker was asked for, as with --collect-only
                exec(eval(line), {"__name__": "__main__"})
        threading._shutdown()  # type: ignore[attr-defined]
        status = 0
    except BaseException:  # noqa: BLE001 - it is shown
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        os._exit(status)
