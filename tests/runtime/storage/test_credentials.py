"""How credentials of stores behind fsspec are looked for and named."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import StorageError
from medusa_runtime.storage import credentials
from medusa_runtime.storage.credentials import google_options
from medusa_runtime.storage.fsspec_store import FsspecStore
from medusa_runtime.storage.retry import RetryPolicy

ANONYMOUS = {"token": "anon"}


@pytest.fixture
def metadata_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> socket.socket:
    """One at another address, which takes connections once it listens. Nobody has logged in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    monkeypatch.setattr(credentials, "_METADATA_SERVER", server.getsockname())
    monkeypatch.setattr(credentials, "_METADATA_S", 0.2)
    return server


def test_without_a_metadata_server_requests_to_google_are_anonymous(metadata_server: socket.socket) -> None:
    with metadata_server:
        assert google_options({}) == ANONYMOUS, "it refuses"
        assert google_options({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == {}, "it may be about to start"
        metadata_server.listen(0)
        assert google_options({}) == {}
        found = google_options({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert found == ANONYMOUS, "it has no room for another connection, and does not answer"


def test_credentials_that_are_named_or_stored_are_used(metadata_server: socket.socket, tmp_path: Path) -> None:
    with metadata_server:
        for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST", "STORAGE_EMULATOR_HOST"):
            assert google_options({name: "x"}) == {}
        (tmp_path / "application_default_credentials.json").touch()
        assert google_options({"CLOUDSDK_CONFIG": str(tmp_path)}) == {}
        assert google_options({}) == ANONYMOUS
        (tmp_path / ".gcs_tokens").touch()
        assert google_options({}) == {}


def _six_times(request: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(request)
    def trying(*arguments: Any) -> Any:
        return [request(*arguments) for _ in range(6)][-1]

    return trying


def test_a_file_system_that_tries_again_by_itself_tries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gcsfs does: its method is wrapped."""
    fsspec = pytest.importorskip("fsspec")
    asked = []

    class System(fsspec.AbstractFileSystem):  # type: ignore[misc,name-defined]
        protocol = "six-times"

        @_six_times
        def _request(self, path: str) -> None:
            asked.append(path)
            raise ValueError

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            self._request(path)
            return {}

    fsspec.register_implementation("six-times", System, clobber=True)
    store = FsspecStore("six-times://bucket/model")
    monkeypatch.setattr(store, "retries", RetryPolicy(attempts=2, first_pause_s=0.0))
    with pytest.raises(StorageError, match="tried 2 times"):
        store.stat("config.json")
    assert len(asked) == 2
