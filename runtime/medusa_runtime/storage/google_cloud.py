"""The store for gs://bucket/prefix: Google Cloud Storage, by its XML API.

On Cloud Run, GKE and Compute Engine the machine's service account is asked for tokens at the metadata server. Keys and
logins in files are read by google-auth. The bytes never pass through it.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import ConfigError, ForbiddenError, MedusaError, MissingPackageError, StorageError, UnreachableError
from .base import redacted
from .bucket_url import parse_bucket_url
from .credentials import RenewedCredentials
from .http.error_body import error_code, first_words
from .http.fields import is_encoded
from .http.store import HttpStore, Target, parse_target
from .http.variables import checked_endpoint, is_true
from .http.wire import Connection, Response, WireError
from .retry import NoAnswerError, RetryPolicy, TransientError, call_within

_ENDPOINT = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_METADATA_SERVER = "169.254.169.254"  # by address: elsewhere its name would be looked up in vain
_METADATA_S = 3.0  # as long as Google's own library waits for one answer
_TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
_ANSWER_BYTES = 64 << 10
_BUSY = (429, 500, 502, 503, 504)
_RENEW_S = 225.0  # before a token expires: the metadata server has the next one from 5 minutes before that on

Token = Callable[[], str | None]  # returns a token that is valid now; None for requests without one


class GoogleCloudStore(HttpStore):
    """A prefix of a bucket.

    It reads the variables that Google's own tools read: GOOGLE_APPLICATION_CREDENTIALS, CLOUDSDK_CONFIG (the login of
    `gcloud auth application-default login`), GCE_METADATA_HOST, NO_GCE_CHECK=true for machines without a metadata
    server, and STORAGE_EMULATOR_HOST. Without credentials, requests are anonymous.
    """

    def __init__(self, url: str, retries: RetryPolicy | None = None, environ: Mapping[str, str] | None = None) -> None:
        bucket, prefix, _ = parse_bucket_url(url, "gs://bucket/prefix")
        self._environ = os.environ if environ is None else environ
        self._token = RenewedCredentials(self._find)
        self._tokenless = ""  # for messages, why the machine gives no token
        super().__init__(f"{self._endpoint()}/{bucket}{f'/{quote(prefix)}' if prefix else ''}", retries, self._environ)
        self.url = url

    def _endpoint(self) -> str:
        emulator = self._environ.get("STORAGE_EMULATOR_HOST")
        if not emulator:
            return _ENDPOINT
        url = emulator if "://" in emulator else f"http://{emulator}"
        return checked_endpoint("STORAGE_EMULATOR_HOST", url).rstrip("/")

    def find_home(self) -> None:
        self._token.find()

    def authorize(self, target: Target, headers: Mapping[str, str]) -> dict[str, str]:
        if target.endpoint != self._home.endpoint:
            return dict(headers)
        token = self._token.current()
        return {**headers, "Authorization": f"Bearer {token}"} if token else dict(headers)

    def _find(self) -> Token:
        """Return a function that returns the current token.

        Raises TransientError where the metadata server is busy, or a pod's may still be about to start.
        """
        env = self._environ
        if env.get("GOOGLE_APPLICATION_CREDENTIALS") or _login(env).exists():
            return self._from_file()
        if env.get("STORAGE_EMULATOR_HOST") or is_true(env, "NO_GCE_CHECK"):
            return lambda: None
        server = MetadataServer(env.get("GCE_METADATA_HOST") or env.get("GCE_METADATA_IP") or _METADATA_SERVER)
        try:
            found = server.token()
        except UnreachableError as error:
            starting = "KUBERNETES_SERVICE_HOST" in env and os.strerror(errno.ECONNREFUSED) in str(error)
            if starting or isinstance(error, _BusyError):
                raise TransientError(StorageError(f"{redacted(self.url)}: {error}")) from None  # for about 8 s
            self._tokenless = f", and no token was sent, because {error}"
            return lambda: None
        return lambda: None if found is None else server.token()

    def _from_file(self) -> Token:
        try:
            import google.auth
            from google.auth.exceptions import GoogleAuthError
            from google.auth.transport.requests import Request
        except ModuleNotFoundError:
            raise MissingPackageError(
                f"{redacted(self.url)}: reading the file of credentials needs google-auth: "
                'pip install "medusa-runtime[gcs]"'
            ) from None

        def answered(what: str, operation: Callable[[], Any]) -> Any:
            try:
                return call_within(self.retries.stall_s, operation)
            except NoAnswerError as error:
                raise TransientError(UnreachableError(f"{redacted(self.url)}: {what}: {error}")) from None
            except (GoogleAuthError, OSError, ValueError) as error:
                raise ForbiddenError(f"{redacted(self.url)}: {what}: {error}") from None

        credentials, _ = answered("no credentials", lambda: google.auth.default(scopes=[_SCOPE]))

        def token() -> str | None:
            if not credentials.valid:
                answered("credentials cannot be refreshed", lambda: credentials.refresh(Request()))
            return str(credentials.token)

        return token

    def lacks_bucket(self, response: Response, body: bytes) -> bool:
        return error_code(body) == "NoSuchBucket"

    def without_ranges(self, response: Response) -> str:
        encoding = response.headers.get("x-goog-stored-content-encoding", "")
        if not is_encoded(encoding):
            return super().without_ranges(response)
        return f"stored with Content-Encoding: {encoding[:60]}, it comes whole and decompressed; upload it without"

    def denial(self, response: Response, body: bytes) -> str | None:
        if response.status not in (401, 403):
            return None
        return (
            f" {first_words(body)}{self._tokenless}; expected credentials that may read it: the machine's service "
            "account, GOOGLE_APPLICATION_CREDENTIALS with the path of a key file, or "
            "`gcloud auth application-default login`. A bucket that anybody may read needs none"
        )


class _BusyError(UnreachableError):
    """The metadata server asks to come back."""


class MetadataServer:
    """The tokens of a machine's service account ("VM metadata" in the documentation of Compute Engine)."""

    def __init__(self, host: str) -> None:
        """Take an address or a name, perhaps with a port. Raises ConfigError if it is neither."""
        try:
            self._endpoint = parse_target(f"http://{host}").endpoint
        except ConfigError:
            raise ConfigError(f"GCE_METADATA_HOST={host!r} cannot be used: expected host[:port]") from None
        self._token, self._expires_at = "", 0.0

    def token(self) -> str | None:
        """Return a token that is valid for some minutes; None if the machine has no service account.

        Raises UnreachableError if there is no metadata server of Google's.
        """
        if time.monotonic() < self._expires_at - _RENEW_S:
            return self._token
        try:
            answer = self._ask()
        except MedusaError:
            if time.monotonic() < self._expires_at:
                return self._token
            raise
        if answer is None:
            return None
        try:
            found = json.loads(answer)
            token, lifetime_s = found["access_token"], float(found["expires_in"])
        except (ValueError, TypeError, KeyError, RecursionError):
            token, lifetime_s = "", 0.0
        if not (isinstance(token, str) and token.isascii() and token.isprintable() and token):
            raise UnreachableError(f"the metadata server {self._endpoint.authority} sent no access token")
        self._token, self._expires_at = token, time.monotonic() + lifetime_s
        return token

    def _ask(self) -> bytes | None:
        where = f"the metadata server {self._endpoint.authority}"
        try:
            connection = Connection(self._endpoint, _METADATA_S)
        except WireError as error:
            raise UnreachableError(f"{where} cannot be reached: {error}") from None
        try:
            response = connection.request(_TOKEN_PATH, {"Metadata-Flavor": "Google"})
            body = connection.body(_ANSWER_BYTES)
        except WireError as error:
            raise UnreachableError(f"{where}: {error}") from None
        finally:
            connection.close()
        googles = response.headers.get("metadata-flavor") == "Google"
        if response.status == 200:  # GKE's sends its name with some answers, but not with tokens
            return body
        if response.status == 404 and googles:
            return None
        kind = _BusyError if response.status in _BUSY and googles else UnreachableError
        raise kind(f"{where} answers {response.status} {first_words(body)}".rstrip())


def _login(environ: Mapping[str, str]) -> Path:
    """Return where gcloud keeps what a user has logged in with."""
    folder = environ.get("CLOUDSDK_CONFIG") or Path("~/.config/gcloud").expanduser()
    return Path(folder, "application_default_credentials.json")
