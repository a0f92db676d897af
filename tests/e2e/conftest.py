"""Real `medusa serve` processes, and proof that they leave nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from process_tree import alive, descendants

MEDUSA = Path(sys.executable).with_name("medusa")
EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


class Serving:
    """One `medusa serve` process on a free port, its output kept in a file."""

    def __init__(
        self, folder: Path, *arguments: str | Path, env: dict[str, str] | None = None, wrapper: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.log = folder / "serve.log"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MEDUSA_")}
        environment |= {"TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"} | (env or {})
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*wrapper, MEDUSA, "serve", "--host", "127.0.0.1", "--port", "0", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    @property
    def port(self) -> int:
        for _ in range(6000):
            for line in self.output().splitlines():
                if "http://127.0.0.1:" in line:
                    return int(line.split("http://127.0.0.1:")[1].split()[0].strip("/,;"))
            if self.process.poll() is not None:
                pytest.fail(f"medusa serve ended with {self.process.returncode}:\n{self.output()}")
            time.sleep(0.01)
        pytest.fail(f"medusa serve printed no address:\n{self.output()}")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def request(
        self, method: str, path: str, body: Any = None, timeout_s: float = 60.0
    ) -> tuple[int, Any, dict[str, str]]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)) as connection:
            encoded = None if body is None else json.dumps(body)
            connection.request(method, path, encoded, {"Content-Type": "application/json"} if encoded else {})
            response = connection.getresponse()
            data = response.read()
            headers = {key.lower(): value for key, value in response.getheaders()}
        return response.status, (json.loads(data) if "json" in headers.get("content-type", "") else data), headers

    def complete(self, prompt: str = "This function returns", **body: Any) -> dict[str, Any]:
        status, answer, _ = self.request(
            "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0} | body
        )
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"medusa serve ended with {self.process.returncode}:\n{self.output()}")
            if self.request("GET", "/readyz")[0] == 200:
                return
            time.sleep(0.05)
        pytest.fail(f"not ready within {timeout_s} s:\n{self.output()}")

    def children(self) -> dict[int, str]:
        """All descendants, by pid, with their command or role."""
        return descendants(self.process.pid)

    def child(self, name: str) -> int:
        for _ in range(6000):
            for pid, role in self.children().items():
                if role == name:
                    return pid
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


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Serving]]:
    """Start `medusa serve` with these arguments; what the test leaves running is killed."""
    started: list[Serving] = []

    def start(*arguments: str | Path, env: dict[str, str] | None = None, wrapper: Sequence[str] = ()) -> Serving:
        # A short path: the engine's Unix socket lies under TMPDIR, and such paths end at 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="m"))
        folder.chmod(0o755)  # a confined instance runs as another user
        started.append(Serving(folder, *arguments, env=env, wrapper=wrapper))
        return started[-1]

    yield start
    for serving in started:
        if serving.process.poll() is None:
            descendants = serving.children()
            serving.process.kill()
            serving.process.wait()
            for pid in descendants:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        subprocess.run(["rm", "-rf", serving.folder], check=True)


@pytest.fixture(scope="session")
def example() -> Path:
    return EXAMPLE
