"""Other packages that fetch an object from an S3 store.

Each does it in the fastest way that its documentation shows, and otherwise with its default settings. The bytes may
stay where the package leaves them (its own buffers, a list of pieces), so that none has to make an extra copy.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from benchmarks.fetch.client import Buffers, Client, Job, main, shared_memory

REGION = "us-east-1"
_RANGE_BYTES = 16 << 20
_THREADS = 4

# What to install for each peer. Peers whose dependencies conflict need environments of their own.
INSTALL = {
    "boto3": "boto3",
    "s3fs": "s3fs",
    "awscrt": "awscrt",
    "obstore": "obstore",
    "runai-model-streamer": "'runai-model-streamer[s3]' torch",
}


def environment(job: Job) -> dict[str, str]:
    """Return the variables that S3 clients need for the origin: endpoint, path style, credentials and the origin's CA.

    The origin accepts any credentials.
    """
    found = {
        "AWS_ENDPOINT_URL": job.url,
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }
    if job.ca_file:
        found |= {"AWS_CA_BUNDLE": job.ca_file, "SSL_CERT_FILE": job.ca_file}
    return found


def prepare_boto3(job: Job) -> Callable[[], Buffers]:
    """Prepare TransferManager's download in ranges, into a file object on shared memory."""
    import boto3

    client = boto3.client("s3")
    fd, memory = shared_memory(job.size_bytes, touched=True)

    def fetch() -> Buffers:
        with os.fdopen(fd, "r+b", buffering=0) as file:
            client.download_fileobj(job.bucket, job.key, file)
        return [memoryview(memory)]

    return fetch


def prepare_s3fs(job: Job) -> Callable[[], Buffers]:
    """Prepare ``cat_ranges``, the fastest call of s3fs here. The pieces stay bytes objects."""
    import s3fs

    verify = {"verify": job.ca_file} if job.ca_file else {}
    store = s3fs.S3FileSystem(endpoint_url=job.url, key="bench", secret="bench", client_kwargs=verify)
    starts = list(range(0, job.size_bytes, _RANGE_BYTES))
    stops = [min(job.size_bytes, start + _RANGE_BYTES) for start in starts]

    def fetch() -> Buffers:
        pieces: list[bytes] = store.cat_ranges([f"{job.bucket}/{job.key}"] * len(starts), starts, stops)
        return pieces

    return fetch


def prepare_awscrt(job: Job) -> Callable[[], Buffers]:
    """Prepare awscrt's S3 client with parts of 8 MiB. The callback copies, because a chunk is valid only in it."""
    auth, http, io, s3 = (import_module(f"awscrt.{name}") for name in ("auth", "http", "io", "s3"))

    bootstrap = io.ClientBootstrap.get_or_create_static_default()
    tls: dict[str, Any] = {"tls_mode": s3.S3RequestTlsMode.DISABLED}
    if job.ca_file:
        options = io.TlsContextOptions()
        options.override_default_trust_store_from_path(None, job.ca_file)
        connection = io.ClientTlsContext(options).new_connection_options()
        connection.set_server_name(job.host)
        tls = {"tls_mode": s3.S3RequestTlsMode.ENABLED, "tls_connection_options": connection}
    client = s3.S3Client(
        bootstrap=bootstrap,
        region=REGION,
        credential_provider=auth.AwsCredentialsProvider.new_static("bench", "bench"),
        part_size=8 << 20,
        throughput_target_gbps=50,
        **tls,
    )
    headers = http.HttpHeaders([("host", f"{job.host}:{job.port}")])
    request = http.HttpRequest("GET", job.path, headers)
    _, memory = shared_memory(job.size_bytes, touched=True)
    view = memoryview(memory)

    def take(chunk: bytes, offset: int, **_: object) -> None:
        view[offset : offset + len(chunk)] = chunk

    def fetch() -> Buffers:
        client.make_request(type=s3.S3RequestType.GET_OBJECT, request=request, on_body=take).finished_future.result()
        return [view]

    return fetch


def prepare_obstore(job: Job) -> Callable[[], Buffers]:
    """Prepare ``get_range`` in four threads. The pieces stay in obstore's own buffers."""
    options: dict[str, Any] = {"allow_http": True}
    if job.ca_file:
        options["allow_invalid_certificates"] = True  # it takes no CA file
    store = import_module("obstore.store").S3Store(
        job.bucket, endpoint=job.url, region=REGION, skip_signature=True, client_options=options,
        virtual_hosted_style_request=False,
    )  # fmt: skip

    def piece(start: int) -> Any:
        return store.get_range(job.key, start=start, end=min(job.size_bytes, start + _RANGE_BYTES))

    def fetch() -> Buffers:
        with ThreadPoolExecutor(_THREADS) as pool:
            return [memoryview(got) for got in pool.map(piece, range(0, job.size_bytes, _RANGE_BYTES))]

    return fetch


def prepare_runai(job: Job) -> Callable[[], Buffers]:
    """Prepare SafetensorsStreamer for the S3 path, with default settings and memory for the whole file."""
    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = "-1"
    streamer_type = import_module("runai_model_streamer").SafetensorsStreamer
    torch = import_module("torch")
    places = _tensor_starts(job)

    def fetch() -> Buffers:
        kept: list[tuple[int, memoryview]] = []
        with streamer_type() as streamer:
            streamer.stream_file(f"s3://{job.bucket}/{job.key}")
            for name, tensor in streamer.get_tensors():
                if job.verify:  # a copy to compare: the streamer's memory is freed at its end
                    kept.append((places[name], memoryview(tensor.clone().view(-1).view(torch.uint8).numpy())))
        return [memoryview(bytes(job.data_start)), *[view for _, view in sorted(kept, key=lambda entry: entry[0])]]

    return fetch


def _tensor_starts(job: Job) -> dict[str, int]:
    request = urllib.request.Request(job.url + job.path, headers={"Range": f"bytes=8-{job.data_start - 1}"})
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=job.ca_file)) as answer:
        return {name: entry["data_offsets"][0] for name, entry in json.load(answer).items()}


CLIENTS: dict[str, Client] = {
    "boto3": prepare_boto3,
    "s3fs": prepare_s3fs,
    "awscrt": prepare_awscrt,
    "obstore": prepare_obstore,
    "runai-model-streamer": prepare_runai,
}

if __name__ == "__main__":
    main(CLIENTS)
