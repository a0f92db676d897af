"""The store for az://container/prefix: Azure Blob Storage.

Keys and shared access signatures are read from variables. Identities (of a machine, a pod or a login) are found by
azure-identity. The bytes never pass through it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote

from ..errors import ConfigError, ForbiddenError, UnreachableError
from .base import redacted
from .bucket_url import parse_bucket_url
from .credentials import RenewedCredentials
from .http.error_body import error_code
from .http.store import HttpStore, Target, parse_target
from .http.variables import is_true
from .http.wire import Response
from .retry import NoAnswerError, RetryPolicy, TransientError, call_within

_API_VERSION = "2021-12-02"
_SCOPE = "https://storage.azure.com/.default"
_SUFFIX = "core.windows.net"
_SUFFIXES = (_SUFFIX, "core.chinacloudapi.cn", "core.usgovcloudapi.net")  # of the clouds that Microsoft runs
_CONTAINER = r"\$root|\$web|[a-z0-9-]{3,63}"
_ACCOUNT = re.compile("[a-z0-9]{3,24}")
_RENEW_S = 300  # before a token expires
_EXPECTED = (
    "expected credentials that may read it in AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with "
    "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or an identity with the role Storage Blob Data Reader, or "
    "AZURE_STORAGE_ANON=true for a container that anybody may read"
)
# Shared Key signs these headers by their place; we send no others of them than Range and conditions.
_SIGNED = (
    "Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date",
    "If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range",
)  # fmt: skip


class Account(NamedTuple):
    """A storage account: its name, the URL of its blobs, and a key or a shared access signature (SAS), if any."""

    name: str
    url: str
    key: bytes | None = None
    sas: str | None = None


class AzureStore(HttpStore):
    """A prefix of a container: az://container/prefix, or abfss://container@account.dfs.core.windows.net/prefix.

    It reads AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or
    AZURE_STORAGE_SAS_TOKEN. Without a key or a signature, azure-identity finds an identity. Where it is not installed,
    or with AZURE_STORAGE_ANON=true, requests are anonymous.
    """

    bucket = "container"

    def __init__(self, url: str, retries: RetryPolicy | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        form = "az://container/prefix"
        container, prefix, host = parse_bucket_url(url, form, kind=self.bucket, names=_CONTAINER)
        self._account = _account(redacted(url), host, self._environ)
        address = f"{self._account.url.rstrip('/')}/{quote(container)}{f'/{quote(prefix)}' if prefix else ''}"
        super().__init__(f"{address}?{self._account.sas}" if self._account.sas else address, retries, self._environ)
        self._token = RenewedCredentials(self._find)
        self._searched = True  # whether everything was looked through in which an identity may be
        self.url = url

    def name(self, key: str) -> str:
        return f"{self.url.rstrip('/')}/{key}"  # in front of an @ there is no secret, but the container

    def find_home(self) -> None:
        self._token.find()

    def authorize(self, target: Target, headers: Mapping[str, str]) -> dict[str, str]:
        if target.endpoint != self._home.endpoint:
            return dict(headers)
        sent = {**headers, "x-ms-version": _API_VERSION}
        if self._account.key is not None:
            return signed(self._account.name, self._account.key, path=target.path, headers=sent)
        token = self._token.current()
        return {**sent, "Authorization": f"Bearer {token}"} if token else sent

    def _find(self) -> Callable[[], str | None]:
        """Return a function that returns the current token of an identity, or None where there is none."""
        if self._account.key or self._account.sas or is_true(self._environ, "AZURE_STORAGE_ANON"):
            return lambda: None
        try:
            from azure.core.exceptions import AzureError
            from azure.identity import DefaultAzureCredential
        except ModuleNotFoundError:
            self._searched = False
            return lambda: None
        credential = DefaultAzureCredential()
        token, expires_at = "", 0

        def current() -> str:
            nonlocal token, expires_at
            if time.time() > expires_at - _RENEW_S:
                try:
                    token, expires_at = call_within(self.retries.patience_s, lambda: credential.get_token(_SCOPE))[:2]
                except NoAnswerError as error:
                    raise TransientError(UnreachableError(f"{redacted(self.url)}: no identity: {error}")) from None
                except AzureError as error:
                    reason = str(error).strip().partition("\n")[0]
                    raise ForbiddenError(f"{redacted(self.url)}: no identity: {reason}; {_EXPECTED}") from None
            return token

        return current

    def lacks_bucket(self, response: Response, body: bytes) -> bool:
        return _code(response, body) == "ContainerNotFound"

    def denial(self, response: Response, body: bytes) -> str | None:
        code = _code(response, body)
        if response.status not in (401, 403) and code != "PublicAccessNotPermitted":
            return None
        return f"{f', {code}' if code else ''}; {self._expected()}"

    def absence(self, response: Response, body: bytes) -> str:
        anonymous = not self._searched or is_true(self._environ, "AZURE_STORAGE_ANON")
        if self._account.key or self._account.sas or not anonymous or _code(response, body) != "ResourceNotFound":
            return super().absence(response, body)
        return f", or a private container, because no credentials were sent; {self._expected()}"

    def _expected(self) -> str:
        missing = "" if self._searched else '; an identity is found with pip install "medusa-runtime[azure]" only'
        return f"{_EXPECTED}{missing}"


def signed(
    account: str, key: bytes, *, path: str, headers: Mapping[str, str], now: float | None = None
) -> dict[str, str]:
    """Return ``headers`` with those added that authorize a GET of ``path`` by Shared Key.

    ``path`` is percent-encoded and has no query. Source: "Authorize with Shared Key" in Azure's documentation.
    """
    stamp = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() if now is None else now))
    sent = {**headers, "x-ms-date": stamp}
    by_name = {name.lower(): value for name, value in sent.items()}
    own = [f"{name}:{by_name[name]}" for name in sorted(by_name) if name.startswith("x-ms-")]
    text = "\n".join(["GET", *(by_name.get(name.lower(), "") for name in _SIGNED), *own, f"/{account}{path}"])
    signature = base64.b64encode(hmac.digest(key, text.encode(), hashlib.sha256)).decode()
    return {**sent, "Authorization": f"SharedKey {account}:{signature}"}


def _account(shown: str, host: str, environ: Mapping[str, str]) -> Account:
    """Return the account that the environment describes, or that ``host``, of the URL, names."""
    text = environ.get("AZURE_STORAGE_CONNECTION_STRING")
    if text:
        found = _connected(text)
    else:
        name = environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        found = Account(
            name,
            f"https://{name}.blob.{_SUFFIX}",
            _key("AZURE_STORAGE_ACCOUNT_KEY", environ.get("AZURE_STORAGE_ACCOUNT_KEY")),
            (environ.get("AZURE_STORAGE_SAS_TOKEN") or "").lstrip("?") or None,
        )
    if not host:
        if not found.name:
            raise ConfigError(
                f"{shown}: expected the account in AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING, or "
                "in the URL (abfss://container@account.dfs.core.windows.net/prefix), found none"
            )
        return found
    name, _, rest = host.partition(".")
    service, _, suffix = rest.partition(".")
    if not _ACCOUNT.fullmatch(name) or service not in ("dfs", "blob") or suffix not in _SUFFIXES:
        raise ConfigError(f"{shown}: expected container@account.dfs.core.windows.net, found {host!a}")
    if found.name and found.name != name:
        raise ConfigError(f"{shown}: expected the account {found.name!a} of the credentials, found {name!a}")
    return found if text else found._replace(name=name, url=f"https://{name}.blob.{suffix}")


def _connected(text: str) -> Account:
    """Parse a connection string: ``name=value;…``."""
    wrong = ConfigError(
        "AZURE_STORAGE_CONNECTION_STRING cannot be used: expected AccountName=…;AccountKey=… or "
        "BlobEndpoint=https://…;SharedAccessSignature=…"
    )
    pairs = [part.partition("=") for part in text.strip().strip(";").split(";")]
    values = {name.strip().lower(): value.strip() for name, _, value in pairs}
    name = values.get("accountname", "")
    url = values.get("blobendpoint") or (
        f"{values.get('defaultendpointsprotocol', 'https')}://{name}.blob.{values.get('endpointsuffix', _SUFFIX)}"
    )
    try:
        target = parse_target(url)
    except ConfigError:
        raise wrong from None
    if not name:
        name = target.endpoint.host.partition(".")[0]
    key, sas = _key("AccountKey", values.get("accountkey")), values.get("sharedaccesssignature", "").lstrip("?") or None
    if not (key or sas):
        raise wrong
    return Account(name, url, key, sas)


def _key(name: str, text: str | None) -> bytes | None:
    if not text:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"{name} cannot be used: expected a key in base64") from None


def _code(response: Response, body: bytes) -> str:
    """Return the code of an error, which a header names, or the body."""
    named = response.headers.get("x-ms-error-code", "")
    if re.fullmatch("[A-Za-z]{1,60}", named):
        return named
    return error_code(body)
