"""Real `medusa serve` processes, and proof that they leave nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, asked_for
from forked_instance import ForkedInstance
from medusa_adapters.bench.served_instance import serve_command
from plain_environ import plain_environ
from process_tree import alive, descendants

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


class Serving(ForkedInstance):
    """One `medusa serve` process with temporary files of its own, its output kept in a file."""

    def __init__(
        self,
        folder: Path,
        *arguments: str | Path,
        env: dict[str, str] | None = None,
        wrapper: Sequence[str] = (),
        fork_server: ForkServer | None = None,
    ) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        environment = plain_environ()
        environment |= {"TMPDIR": str(self.temporary)} | (env or {})
        command = [*wrapper, *serve_command(*arguments)]
        log = open(folder / "serve.log", "w+b")  # noqa: SIM115 (closed with the instance)
        super().__init__(command, environment, fork_server=None if wrapper else fork_server, log=log)

    def request(
        self, method: str, path: str, body: Any = None, timeout_s: float = 60.0
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (parsed when it is JSON) and headers (lower case)."""
        answer = self.exchange(method, path, None if body is None else json.dumps(body), timeout_s=timeout_s)
        headers = {key.lower(): value for key, value in answer.headers.items()}
        return answer.status, (answer.json if "json" in headers.get("content-type", "") else answer.body), headers

    def complete(self, prompt: str = "This function returns", **body: Any) -> dict[str, Any]:
        status, answer, _ = self.request(
            "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0} | body
        )
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def children(self) -> dict[int, str]:
        """All descendants, by pid, with their command or role."""
        return descendants(self.process.pid)

    def child(self, name: str) -> int:
        for _ in range(6000):
            for pid, role in self.children().items():
                if role == name:
                    return pid
            if self.process.poll() is not None:
                pytest.fail(f"no process {name!r}, for the instance has ended:\n{self.output()}")
            time.sleep(0.01)
        pytest.fail(f"no process {name!r} among {self.children()}")

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, then check that nothing of it is left."""
        descendants = self.children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait_gone(descendants, timeout_s)

    def wait_gone(self, descendants: dict[int, str] | None = None, timeout_s: float = 60.0) -> int:
        status = self.process.wait(timeout=timeout_s)
        deadline = time.monotonic() + 60.0
        while (left := {p: n for p, n in (descendants or {}).items() if alive(p)}) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"processes left behind: {left}"
        assert list(self.temporary.iterdir()) == [], "temporary files left behind"
        return status


def _starting(request: pytest.FixtureRequest) -> Iterator[Callable[..., Serving]]:
    server = asked_for(request)
    started: list[Serving] = []

    def start(*arguments: str | Path, env: dict[str, str] | None = None, wrapper: Sequence[str] = ()) -> Serving:
        # A short path: the engine's Unix socket lies under TMPDIR, and such paths end at 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="m"))
        folder.chmod(0o755)  # a confined instance runs as another user
        started.append(Serving(folder, *arguments, env=env, wrapper=wrapper, fork_server=server))
        return started[-1]

    yield start
    for serving in started:
        serving.close()
        subprocess.run(["rm", "-rf", serving.folder], check=True)


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Serving]]:
    """Start `medusa serve` with these arguments; what the test leaves running is killed.

    A test with the mark ``forked`` says nothing about imports: its processes are forked from one that has done them.
    """
    yield from _starting(request)


@pytest.fixture(scope="module")
def start_shared(request: pytest.FixtureRequest) -> Iterator[Callable[..., Serving]]:
    """The same for an instance that several tests of a module use."""
    yield from _starting(request)


@pytest.fixture(scope="session")
def example() -> Path:
    return EXAMPLE
