"""az:// against Azurite, Azure's own emulator, where it is installed, and the signature against Azure's library."""

from __future__ import annotations

import base64
import datetime
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import ConfigError, ForbiddenError, ObjectChangedError, ObjectNotFoundError
from medusa_runtime.storage.azure import AzureStore, signed
from medusa_runtime.storage.base import open_store
from medusa_runtime.storage.retry import RetryPolicy
from scripted_server import ScriptedServer
from store_contract import check_ranges_and_versions

BODY = bytes(range(256)) * 1000
QUICK = RetryPolicy(attempts=1, unreachable_attempts=1)
ACCOUNT, KEY = "devstoreaccount1", base64.b64encode(bytes(range(64))).decode()
HOW = "npm install azurite, with node_modules/.bin in PATH"


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the connection string of an emulator with one object."""
    program = shutil.which("azurite-blob") or pytest.skip(f"Azurite is not installed: {HOW}")
    blob = pytest.importorskip("azure.storage.blob")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("azurite")
    flags = ["--location", str(folder), "--blobPort", str(port), "--skipApiVersionCheck", "--disableTelemetry"]
    environ = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    with subprocess.Popen([program, *flags], env=environ, stdout=subprocess.DEVNULL) as server:
        try:
            text = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
            _wait_for(port, server)
            with blob.BlobServiceClient.from_connection_string(text) as client:
                container = client.create_container("models")
                container.upload_blob("my model/v1/w", BODY)
                client.create_container("public", public_access="blob").upload_blob("m/w", BODY)
            yield text
        finally:
            server.terminate()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("Azurite does not listen")


@pytest.fixture
def open_container() -> Iterator[Callable[..., AzureStore]]:
    opened: list[AzureStore] = []

    def open_container(url: str, **environ: str) -> AzureStore:
        opened.append(AzureStore(url, QUICK, environ))
        return opened[-1]

    yield open_container
    for store in opened:
        store.close()


def test_ranges_and_versions(azurite: str, open_container: Callable[..., AzureStore]) -> None:
    store = open_container("az://models/my model/v1", AZURE_STORAGE_CONNECTION_STRING=azurite)
    check_ranges_and_versions(store, BODY)
    nowhere = open_container("az://modles/v1", AZURE_STORAGE_CONNECTION_STRING=azurite)
    with pytest.raises(ObjectNotFoundError, match=r"az://modles/v1/w: no such container \(404\)"):
        nowhere.stat("w")


def test_a_replaced_object_is_a_change(azurite: str, open_container: Callable[..., AzureStore]) -> None:
    from azure.storage.blob import BlobServiceClient

    store = open_container("az://models/m", AZURE_STORAGE_CONNECTION_STRING=azurite)
    with BlobServiceClient.from_connection_string(azurite) as client:
        place = client.get_blob_client("models", "m/changing")
        place.upload_blob(BODY)
        version = store.stat("changing").version
        place.upload_blob(BODY[::-1], overwrite=True)
    with pytest.raises(ObjectChangedError):
        store.read("changing", 0, 10, version)


def test_a_shared_access_signature(azurite: str, open_container: Callable[..., AzureStore]) -> None:
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    expiry = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    permission = ContainerSasPermissions(read=True)
    sas = generate_container_sas(ACCOUNT, "models", account_key=KEY, permission=permission, expiry=expiry)
    endpoint = azurite.partition("BlobEndpoint=")[2].strip(";")
    text = f"BlobEndpoint={endpoint};SharedAccessSignature={sas}"
    store = open_container("az://models/my model/v1", AZURE_STORAGE_CONNECTION_STRING=text)
    assert store.read("w", 5, 10)[0] == BODY[5:10]
    store = open_container("az://models/v1", AZURE_STORAGE_CONNECTION_STRING=text.replace("sig=", "sig=A"))
    with pytest.raises(ForbiddenError, match="expected credentials") as denied:
        store.stat("w")
    assert "sig=" not in str(denied.value)


def test_a_wrong_key_and_none(azurite: str, open_container: Callable[..., AzureStore]) -> None:
    wrong = azurite.replace(KEY, base64.b64encode(b"another").decode())
    with pytest.raises(ForbiddenError, match=r"AuthorizationFailure|AuthenticationFailed"):
        open_container("az://models/m", AZURE_STORAGE_CONNECTION_STRING=wrong).stat("w")


@pytest.mark.parametrize("key", ["my model/a+b~c.safetensors", "w"])
def test_the_signature_is_that_of_azures_library(key: str) -> None:
    rest = pytest.importorskip("azure.core.pipeline.transport")
    from azure.core.pipeline import PipelineContext, PipelineRequest
    from azure.storage.blob._shared.authentication import SharedKeyCredentialPolicy

    url = "az://models/m"
    store = AzureStore(url, QUICK, {"AZURE_STORAGE_ACCOUNT_NAME": "lab", "AZURE_STORAGE_ACCOUNT_KEY": KEY})
    path = store.target(key).path
    ours = signed("lab", base64.b64decode(KEY), path=path, headers={"If-Match": '"1"', "x-ms-version": "2021-12-02"})
    request = rest.HttpRequest("GET", f"https://lab.blob.core.windows.net{path}")
    request.headers.update({name: value for name, value in ours.items() if name != "Authorization"})
    wrapped: Any = PipelineRequest(request, PipelineContext(None))
    SharedKeyCredentialPolicy("lab", KEY).on_request(wrapped)
    assert ours["Authorization"] == request.headers["Authorization"]
    store.close()


def _object(head: bytes) -> bytes:
    return b'HTTP/1.1 206 P\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/9\r\nETag: "1"\r\n\r\n0'


def test_an_identity_of_the_machine(
    open_container: Callable[..., AzureStore], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As App Service and Container Apps give it."""
    pytest.importorskip("azure.identity")

    def token(head: bytes) -> bytes:
        if b"X-IDENTITY-HEADER: secret" not in head and b"x-identity-header: secret" not in head.lower():
            return b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"
        body = json.dumps(
            {
                "access_token": "eyJ.machine",
                "expires_on": str(int(time.time()) + 3600),
                "resource": "x",
                "token_type": "Bearer",
            }
        ).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    with ScriptedServer(token) as identity, ScriptedServer(_object) as blobs:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{identity.url}/msi/token")
        monkeypatch.setenv("IDENTITY_HEADER", "secret")
        monkeypatch.setenv("HOME", str(tmp_path))
        store = open_container("az://models/m", AZURE_STORAGE_ACCOUNT_NAME="lab")
        store._home = store._home._replace(
            endpoint=store._home.endpoint._replace(tls=False, host="127.0.0.1", port=blobs.port)
        )
        assert store.stat("w").size == store.stat("w").size == 9
        assert len(identity.requests) == 1
        assert all(b"Authorization: Bearer eyJ.machine" in head for head in blobs.requests)
        assert all(b"x-ms-version: 2021-12-02" in head for head in blobs.requests)


def test_no_identity_is_one_error(
    open_container: Callable[..., AzureStore], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("azure.identity")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")  # no machine's or login's
    with pytest.raises(ForbiddenError, match=r"no identity: .*AZURE_STORAGE_ANON=true for a container"):
        open_container("az://models/m", AZURE_STORAGE_ACCOUNT_NAME="lab").stat("w")


def test_anonymous(open_container: Callable[..., AzureStore]) -> None:
    with ScriptedServer(_object) as blobs:
        store = open_container("az://models/m", AZURE_STORAGE_ACCOUNT_NAME="lab", AZURE_STORAGE_ANON="true")
        store._home = store._home._replace(
            endpoint=store._home.endpoint._replace(tls=False, host="127.0.0.1", port=blobs.port)
        )
        assert store.stat("w").size == 9
        assert b"Authorization" not in blobs.requests[0]


@pytest.mark.parametrize("environ", [{"AZURE_STORAGE_ANON": "true"}, {"AZURE_STORAGE_ACCOUNT_KEY": KEY}])
def test_a_private_container_is_missing_to_whoever_sends_no_credentials(
    environ: dict[str, str], open_container: Callable[..., AzureStore]
) -> None:
    """Azure answers 404 then, so that nobody learns which containers there are."""
    missing = b"HTTP/1.1 404 N\r\nx-ms-error-code: ResourceNotFound\r\nContent-Length: 0\r\n\r\n"
    with ScriptedServer(lambda head: missing) as blobs:
        store = open_container("abfss://models@lab.dfs.core.windows.net/m", **environ)
        store._home = store._home._replace(
            endpoint=store._home.endpoint._replace(tls=False, host="127.0.0.1", port=blobs.port)
        )
        with pytest.raises(ObjectNotFoundError, match=r"^abfss://models@lab\S*/m/w: no such object \(404\)") as raised:
            store.stat("w")
    said = "or a private container, because no credentials were sent; expected credentials" in str(raised.value)
    assert said == ("AZURE_STORAGE_ANON" in environ)


NAMED = {"AZURE_STORAGE_ACCOUNT_NAME": "lab"}
SECRET = {"AZURE_STORAGE_ACCOUNT_KEY": KEY}


@pytest.mark.parametrize(
    ("url", "environ", "address"),
    [
        ("az://models/my m", NAMED, "https://lab.blob.core.windows.net/models/my%20m/w"),
        ("abfs://models", NAMED, "https://lab.blob.core.windows.net/models/w"),
        ("abfss://models@lab.dfs.core.windows.net/m/", {}, "https://lab.blob.core.windows.net/models/m/w"),
        ("az://models@lab.blob.core.chinacloudapi.cn/m", NAMED, "https://lab.blob.core.chinacloudapi.cn/models/m/w"),
        (
            "az://models/m",
            {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=https;AccountName=lab;AccountKey={KEY};"
             "EndpointSuffix=core.usgovcloudapi.net"},
            "https://lab.blob.core.usgovcloudapi.net/models/m/w",
        ),
        (
            "az://models/m",
            {**NAMED, "AZURE_STORAGE_SAS_TOKEN": "?sv=1&sig=a%2Bb%3D"},
            "https://lab.blob.core.windows.net/models/m/w?sv=1&sig=a%2Bb%3D",
        ),
    ],
)  # fmt: skip
def test_addresses(url: str, environ: dict[str, str], address: str, open_container: Callable[..., AzureStore]) -> None:
    target = open_container(url, **environ).target("w")
    assert f"{'https' if target.endpoint.tls else 'http'}://{target.endpoint.authority}{target.path}" == address


@pytest.mark.parametrize(
    ("url", "environ", "words"),
    [
        ("az://", NAMED, "found no container"),
        ("az:///m", NAMED, "found no container"),
        ("az://models/m", {}, "expected the account in AZURE_STORAGE_ACCOUNT_NAME"),
        (
            "az://models/m",
            {**NAMED, "AZURE_STORAGE_ACCOUNT_KEY": "no base64!"},
            "AZURE_STORAGE_ACCOUNT_KEY cannot be used",
        ),
        ("abfss://models@evil.example.com/m", {**NAMED, **SECRET}, "expected container@account.dfs.core.windows.net"),
        ("abfss://models@lab.dfs.evil.example/m", {**NAMED, **SECRET}, "expected container@account.dfs.core.windows"),
        ("abfss://models@other.dfs.core.windows.net/m", {**NAMED, **SECRET}, "expected the account 'lab'"),
        ("az://models/m", {"AZURE_STORAGE_CONNECTION_STRING": "rubbish"}, "CONNECTION_STRING cannot be used"),
        ("az://models/m", {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=lab"}, "CONNECTION_STRING cannot be used"),
        (
            "az://models/m",
            {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName=a b;AccountKey={KEY}"},
            "CONNECTION_STRING cannot be used",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_without_secrets(url: str, environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        AzureStore(url, QUICK, environ)
    assert KEY not in str(refused.value)
    assert "no base64!" not in str(refused.value)


def test_its_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "lab")
    for scheme in ("az", "abfs", "abfss"):
        store = open_store(f"{scheme}://models/m")
        assert isinstance(store, AzureStore)
        store.close()
