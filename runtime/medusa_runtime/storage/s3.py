"""The store for s3://bucket/prefix: S3 and compatible stores.

Where the environment does not hold credentials, botocore finds them. The bytes never pass through it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import ForbiddenError, MissingPackageError
from .base import redacted
from .bucket_url import parse_bucket_url
from .credentials import RenewedCredentials
from .http.error_body import error_code, first_words
from .http.store import HttpStore, Target, parse_target
from .http.variables import checked_endpoint, is_true
from .http.wire import Response
from .retry import RetryPolicy
from .sigv4 import Credentials, signed

_ELSEWHERE = (  # variables that name other sources of credentials, which only botocore can read
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_USUAL_REGION = "us-east-1"
_REGION = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_DENIALS = {  # S3's codes, some of which come with status 400, and what to do
    "ExpiredToken": "the credentials have expired; expected new ones, or a role or profile that renews them",
    "RequestTimeTooSkewed": "the clock of this machine is wrong; expected the time of S3, within 15 minutes",
    "InvalidAccessKeyId": "S3 does not know the access key; expected one of this service",
    "InvalidToken": "the session token is not valid; expected the one that belongs to the keys",
    "InvalidObjectState": "the object is archived; expected one in a class of storage that can be read at once",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key; expected the two of a pair",
}


class S3Store(HttpStore):
    """A prefix of a bucket.

    It reads the variables that AWS's own tools read: AWS_ACCESS_KEY_ID and its companions, AWS_PROFILE, AWS_REGION,
    AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (with which the bucket is part of the path), and AWS_NO_SIGN_REQUEST=true
    for public buckets.
    """

    def __init__(self, url: str, retries: RetryPolicy | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._bucket, self._prefix, _ = parse_bucket_url(url, "s3://bucket/prefix")
        self._endpoint_url = self._endpoint()
        self._region = self._environ.get("AWS_REGION") or self._environ.get("AWS_DEFAULT_REGION")
        self._credentials = RenewedCredentials(self._find)  # finding them may also set the region and the endpoint
        self._searched = True  # whether everything was looked through in which credentials may be
        super().__init__(self._address(), retries, self._environ)
        self.url = url

    def _endpoint(self) -> str | None:
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if url := self._environ.get(name):
                return checked_endpoint(name, url)
        return None

    def _address(self) -> str:
        prefix = f"/{quote(self._prefix)}" if self._prefix else ""
        if self._endpoint_url:
            return f"{self._endpoint_url.rstrip('/')}/{self._bucket}{prefix}"
        region = self._region or _USUAL_REGION
        host = f"s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
        if "." in self._bucket:  # the certificate covers one label in front of the host
            return f"https://{host}/{self._bucket}{prefix}"
        return f"https://{self._bucket}.{host}{prefix}"

    def find_home(self) -> None:
        self._credentials.find()

    def target(self, key: str) -> Target:
        return super().target(key)._replace(region=self._region or _USUAL_REGION)

    def authorize(self, target: Target, headers: Mapping[str, str]) -> dict[str, str]:
        credentials = self._credentials.current()
        if credentials is None or target.endpoint != self._home.endpoint:
            return dict(headers)
        return signed(
            credentials,
            region=target.region,
            host=target.endpoint.authority,
            path=target.path,
            headers=headers,
        )

    def _find(self) -> Callable[[], Credentials | None]:
        """Return a function that returns the current credentials, or None where requests are not signed.

        They come from the environment, or from botocore, which keeps them fresh.
        """
        env = self._environ
        if is_true(env, "AWS_NO_SIGN_REQUEST"):
            return lambda: None
        profile = any(env.get(name) for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE"))
        if not profile and env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
            fixed = Credentials(
                env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"], env.get("AWS_SESSION_TOKEN") or None
            )
            return lambda: fixed
        try:
            import botocore.session  # 0.1 s, and only needed if the environment does not have the keys themselves
        except ModuleNotFoundError:
            self._searched = False
            if any(env.get(name) for name in _ELSEWHERE) or Path("~/.aws/credentials").expanduser().exists():
                raise MissingPackageError(
                    f'{redacted(self.url)}: finding these credentials needs boto3: pip install "medusa-runtime[s3]"'
                ) from None
            return lambda: None
        return self._from_botocore(botocore.session.Session())

    def _from_botocore(self, session: Any) -> Callable[[], Credentials | None]:
        from botocore.exceptions import BotoCoreError

        try:
            found = session.get_credentials()
            if self._region is None:
                self._adopt(session.get_config_variable("region"))
            if self._endpoint_url is None and (configured := session.get_scoped_config().get("endpoint_url")):
                self._endpoint_url = configured
                self._adopt(self._region)
        except BotoCoreError as error:
            raise ForbiddenError(f"{redacted(self.url)}: no credentials: {error}") from None
        if found is None:
            return lambda: None

        def frozen() -> Credentials:
            try:
                now = found.get_frozen_credentials()  # refreshes them when they are about to expire
            except BotoCoreError as error:
                raise ForbiddenError(f"{redacted(self.url)}: credentials cannot be refreshed: {error}") from None
            return Credentials(now.access_key, now.secret_key, now.token)

        return frozen

    def _adopt(self, region: str | None) -> None:
        self._region = region
        self._home = parse_target(self._address())

    def relocate(self, target: Target, response: Response) -> bool:
        region = response.headers.get("x-amz-bucket-region", "")
        if response.status not in (301, 307, 400, 403) or region == target.region:
            return False
        if not _REGION.fullmatch(region):  # it becomes a part of a host's name
            return False
        self._adopt(region)
        return True

    def lacks_bucket(self, response: Response, body: bytes) -> bool:
        return error_code(body) == "NoSuchBucket"

    def denial(self, response: Response, body: bytes) -> str | None:
        code = error_code(body)
        if code in _DENIALS:
            return f", {code}: {_DENIALS[code]}"
        if response.status not in (401, 403):
            return None
        said = f" {first_words(body)}" if code == "AccessDenied" else ""
        return (
            f"{said}; S3 answers this also for objects that do not exist when listing is not allowed. Expected "
            "credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role, "
            "or AWS_NO_SIGN_REQUEST=true for a public bucket"
            + ("" if self._searched else '; a role is found with boto3 only: pip install "medusa-runtime[s3]"')
        )
