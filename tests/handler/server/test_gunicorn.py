"""gunicorn's methods that ours override, in the versions that are accepted."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import gunicorn
import pytest
from gunicorn.workers.base import Worker as BaseWorker
from gunicorn.workers.gthread import TConn, ThreadWorker
from medusa_handler.server import gunicorn_worker
from medusa_handler.server.gunicorn_options import worker_folder
from medusa_runtime.errors import ConfigError

ROOT = Path(__file__).parents[3]
OWN = vars(gunicorn_worker.Worker)
OVERRIDDEN = sorted(name for name in OWN if name in dir(ThreadWorker) and not name.startswith("__"))
# What the overriding methods use of the worker and of its connections, beside what they override.
USED = {"on_pending_socket_readable": ThreadWorker, "set_timeout": TConn, "close": TConn}


def declared() -> str:
    (found,) = (
        text
        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if text.startswith("gunicorn")
    )
    return str(found)


def names_of(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_declared_range_is_the_one_that_is_checked() -> None:
    oldest, below = (tuple(map(int, part.split("."))) for part in re.findall(r"[\d.]+", declared()))
    assert (oldest, below) == (gunicorn_worker.OLDEST, gunicorn_worker.BELOW)
    assert gunicorn_worker.OLDEST <= gunicorn.version_info[:2] < gunicorn_worker.BELOW


def test_what_is_overridden_has_gunicorns_own_signatures() -> None:
    expected = ["accept", "enqueue_req", "get_thread_pool", "handle", "handle_error", "handle_exit", "handle_request"]
    assert [*expected, "init_process", "murder_pending", "notify", "on_client_socket_readable"] == OVERRIDDEN
    differing = {
        name: (names_of(getattr(gunicorn_worker.Worker, name)), names_of(getattr(ThreadWorker, name)))
        for name in OVERRIDDEN
        if names_of(getattr(gunicorn_worker.Worker, name)) != names_of(getattr(ThreadWorker, name))
    }
    assert not differing
    assert set(names_of(TConn.close)[1:]) <= set(names_of(gunicorn_worker._closed))


def test_what_is_used_is_there() -> None:
    assert [name for name, owner in USED.items() if not hasattr(owner, name)] == []
    made = inspect.getsource(ThreadWorker) + inspect.getsource(TConn) + inspect.getsource(BaseWorker)
    for attribute in ("pending_conns", "poller", "method_queue", "alive", "initialized", "data_ready", "sock"):
        assert f"self.{attribute} = " in made, attribute


def test_an_older_version_is_refused_and_a_newer_one_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    gunicorn_worker.check_version()
    with pytest.raises(ConfigError, match=re.escape(f"expected {declared()}, found 23.0.0: pip install")):
        gunicorn_worker.check_version((23, 0, 0))
    assert not caplog.records
    gunicorn_worker.check_version((99, 1, 0))
    assert "gunicorn 99.1.0 is newer than the tested ones" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_requests_are_served_at_both_ends_of_the_range(tmp_path: Path, end: str) -> None:
    """The tests of a served function, streams, probes and a stop among them, with another gunicorn."""
    wanted = f"gunicorn=={'.'.join(map(str, gunicorn_worker.OLDEST))}.0" if end == "oldest" else declared()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    installed = subprocess.run(
        [*install, "--target", str(tmp_path / "installed"), wanted], capture_output=True, text=True, check=False
    )
    assert installed.returncode == 0, installed.stderr
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    where = subprocess.run(
        [sys.executable, "-c", "import gunicorn; print(gunicorn.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(tmp_path))
    names = ("server/test_gunicorn", "test_serving", "server/test_probe_acceptor")
    tests = [f"tests/handler/{name}.py" for name in names]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


def test_without_shared_memory_the_workers_file_is_among_the_temporary_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert worker_folder(str(tmp_path)) == str(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert worker_folder("/nowhere") == str(tmp_path)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert worker_folder("/nowhere") == "/tmp"
