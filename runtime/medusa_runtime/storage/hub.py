"""The store for hf://org/name: a model on the Hugging Face Hub, or on a mirror that HF_ENDPOINT names.

A file's address is ``/org/name/resolve/REVISION/FILE``. The Hub answers with the file, or redirects to its content
network, and says in ``X-Repo-Commit`` of which commit the answer is ("Hub API Endpoints" and "Downloading files" in the
Hub's documentation). The Hub's own client does the same, but takes 0.6 s of CPU time to import.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from ..errors import ConfigError, ObjectChangedError, UnreachableError
from .base import redacted
from .http.store import HttpStore, Target
from .http.variables import checked_endpoint, is_true
from .http.wire import Response
from .retry import RetryPolicy

_ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile("[0-9a-f]{40}")
_NAME = re.compile(
    r"((?:datasets/|spaces/)?[\w.-]+/[\w.-]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.*))?", re.ASCII
)
_MOST_SAID = 200  # characters of the Hub's own message
_MISSING = ("RepoNotFound", "RevisionNotFound")  # in X-Error-Code
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


class HubStore(HttpStore):
    """A model, or a folder in it.

    A branch or tag is read at the commit that the first answer names, so all files are of one commit.

    It reads the variables that the Hub's own client reads: HF_TOKEN, HF_TOKEN_PATH and HF_HOME (the token of
    ``hf auth login``), HF_ENDPOINT and HF_HUB_OFFLINE.
    """

    bucket = "model or revision"

    def __init__(self, url: str, retries: RetryPolicy | None = None, environ: Mapping[str, str] | None = None) -> None:
        found = _NAME.fullmatch(url.partition("://")[2].rstrip("/"))
        if found is None:
            raise ConfigError(
                f"{redacted(url)} cannot be used: expected hf://org/name or hf://org/name@revision, "
                "found no organization or no name"
            )
        self._environ = os.environ if environ is None else environ
        self._repository, revision, folder = found[1], unquote(found[2] or "main"), found[3]
        self._revision = revision
        self._folder = f"{quote(unquote(folder))}/" if folder else ""
        self._pinned = threading.Lock()
        super().__init__(self._endpoint(), retries, self._environ)
        self._token, self._token_place = self._find_token()
        self.url = url

    def _endpoint(self) -> str:
        url = self._environ.get("HF_ENDPOINT")
        return checked_endpoint("HF_ENDPOINT", url) if url else _ENDPOINT

    def _find_token(self) -> tuple[str | None, str]:
        """Return the token, if there is one, and for messages where it was found."""
        env, place = self._environ, "HF_TOKEN"
        token = env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN")
        if not token and not is_true(env, "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
            token, place = _first_line(_token_path(env)), str(_token_path(env))
        token = token and token.strip()
        if token and not (token.isascii() and token.isprintable()):
            raise ConfigError("HF_TOKEN cannot be used: expected a token in one line, found other characters")
        return token or None, place

    def limit_redirects(self, allows: Callable[[str], bool]) -> None:
        """Do nothing: the Hub, which no caller chooses, redirects to hosts of its content network as it likes."""

    def find_home(self) -> None:
        if is_true(self._environ, "HF_HUB_OFFLINE"):
            raise UnreachableError(
                f"{redacted(self.url)}: HF_HUB_OFFLINE is set, which forbids every request; unset it, or name a folder"
            )

    def target(self, key: str) -> Target:
        revision = quote(self._revision, safe="")
        path = f"{self._home.path.rstrip('/')}/{self._repository}/resolve/{revision}/{self._folder}{quote(key)}"
        return Target(self._home.endpoint, path)

    def authorize(self, target: Target, headers: Mapping[str, str]) -> dict[str, str]:
        if self._token and target.endpoint == self._home.endpoint:
            return {**headers, "Authorization": f"Bearer {self._token}"}
        return super().authorize(target, headers)

    def notice(self, key: str, response: Response) -> None:
        """Adopt the commit of the first answer. Raises ObjectChangedError if another request was of another commit."""
        commit = response.headers.get("x-repo-commit", "")
        if not _COMMIT.fullmatch(commit):
            return
        with self._pinned:
            if not _COMMIT.fullmatch(self._revision):
                self._revision = commit
        if commit != self._revision:
            raise ObjectChangedError(
                f"{self.name(key)} changed while it was read: expected commit {self._revision}, found {commit}; "
                "start again"
            )

    def lacks_bucket(self, response: Response, body: bytes) -> bool:
        return response.headers.get("x-error-code") in _MISSING

    def denial(self, response: Response, body: bytes) -> str | None:
        if response.status not in (401, 403):
            return None
        token = f"the token in {self._token_place} is used" if self._token else "HF_TOKEN is not set"
        said = "".join(filter(str.isprintable, response.headers.get("x-error-message", "")))[:_MOST_SAID]
        said = f" ({said})" if said else ""
        if response.headers.get("x-error-code") == "GatedRepo":
            return f"; the model is gated: accept its terms on the Hub, with the account of the token ({token}){said}"
        if response.status == 401 and self._token:
            return (
                f"; the Hub does not accept the token in {self._token_place}{said}: replace or remove it; a public "
                "model needs none"
            )
        return f"; no such model, or a private or gated one, which needs a token that may read it ({token}){said}"

    def higher_limit(self) -> str:
        return "" if self._token else "; it allows more to requests with a token (HF_TOKEN)"

    def detour(self) -> str:
        proxy = next((name for name in _PROXIES if self._environ.get(name)), None)
        through = f"through the proxy in {proxy}" if proxy else "HTTPS_PROXY is not set"
        return f" ({through}; HF_ENDPOINT may name a mirror)"


def _token_path(environ: Mapping[str, str]) -> Path:
    """Return where `hf auth login` keeps its token."""
    if path := environ.get("HF_TOKEN_PATH"):
        return Path(path).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "token"


def _first_line(path: Path) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline(1024)
    except OSError:
        return ""
