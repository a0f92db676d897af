from __future__ import annotations

import ssl
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path

import pytest

from benchmarks.fetch.checkpoint import BUCKET, KEY, ServedCheckpoint, make_checkpoint
from benchmarks.origin import VARIANTS, Origin, Variant, nginx_path
from benchmarks.ranged_server import parse_range

SIZE_BYTES = 3_000_000
SERVERS = [
    pytest.param(True, id="built-in"),
    pytest.param(False, id="nginx", marks=pytest.mark.skipif(not nginx_path(), reason="nginx is not installed")),
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> ServedCheckpoint:
    return make_checkpoint(tmp_path / "root", SIZE_BYTES)


@contextmanager
def started(checkpoint: ServedCheckpoint, folder: Path, variant: Variant, builtin: bool) -> Iterator[Origin]:
    with Origin(checkpoint.root, folder / "scratch", variant, builtin=builtin) as origin:
        yield origin


def get(origin: Origin, path: str = f"/{BUCKET}/{KEY}", **headers: str) -> tuple[int, Message, bytes]:
    context = ssl.create_default_context(cafile=str(origin.ca_file)) if origin.ca_file else None
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(origin.url + path, headers=names), context=context
        ) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.mark.parametrize("builtin", SERVERS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_serves_the_checkpoint(
    checkpoint: ServedCheckpoint, tmp_path: Path, variant: Variant, builtin: bool
) -> None:
    with started(checkpoint, tmp_path, variant, builtin) as origin:
        status, headers, body = get(origin)

    assert (status, len(body), headers["Content-Length"]) == (200, checkpoint.size_bytes, str(checkpoint.size_bytes))
    assert zlib.crc32(body[checkpoint.data_start :]) == checkpoint.crc
    assert headers["ETag"]
    assert origin.url.startswith("https:" if variant.tls else "http:")


@pytest.mark.parametrize("builtin", SERVERS)
def test_ranges_versions_and_missing_objects(checkpoint: ServedCheckpoint, tmp_path: Path, builtin: bool) -> None:
    with started(checkpoint, tmp_path, VARIANTS[0], builtin) as origin:
        _, whole, body = get(origin)
        status, headers, part = get(origin, Range="bytes=100-2000099", If_Match=whole["ETag"])
        assert (status, part == body[100:2000100]) == (206, True)
        assert headers["Content-Range"] == f"bytes 100-2000099/{checkpoint.size_bytes}"
        assert get(origin, Range="bytes=-7")[2] == body[-7:]
        assert get(origin, Range=f"bytes={checkpoint.size_bytes}-")[0] == 416
        assert get(origin, If_Match='"another"')[0] == 412
        status, headers, error = get(origin, path=f"/{BUCKET}/nothing")
        assert (status, headers["Content-Type"]) == (404, "application/xml")
        assert b"<Code>NoSuchKey</Code>" in error


def test_the_built_in_server_keeps_to_its_root(checkpoint: ServedCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not served")
    with started(checkpoint, tmp_path, VARIANTS[0], builtin=True) as origin:
        assert get(origin, path="/../secret")[0] == 404
        assert get(origin, path="/%2e%2e/secret")[0] == 404


@pytest.mark.parametrize("builtin", SERVERS)
def test_links_under_the_root_are_followed(checkpoint: ServedCheckpoint, tmp_path: Path, builtin: bool) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("served")
    (checkpoint.root / BUCKET / "linked").symlink_to(elsewhere)
    with started(checkpoint, tmp_path, VARIANTS[0], builtin) as origin:
        assert get(origin, path=f"/{BUCKET}/linked/weights")[::2] == (200, b"served")
        assert get(origin, path=f"/{BUCKET}/linked/../../elsewhere/weights")[0] in (400, 404)
        assert get(origin, path=f"/{BUCKET}/linked")[0] in (301, 404)  # a folder is no object


@pytest.mark.parametrize("builtin", SERVERS)
def test_a_limit_holds_for_each_connection(checkpoint: ServedCheckpoint, tmp_path: Path, builtin: bool) -> None:
    # Two connections, 2.5 MB at 2.5 MB/s each: a limit can only be undercut by load, never be beaten.
    with started(checkpoint, tmp_path, Variant("slow", rate_bytes_per_s=2_500_000), builtin) as origin:
        lengths: list[int] = []
        threads = [threading.Thread(target=lambda: lengths.append(len(get(origin)[2]))) for _ in range(2)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
    assert lengths == [checkpoint.size_bytes] * 2
    assert seconds > 0.8
    assert builtin or origin.connections() == 2


def test_latency_comes_before_each_answer(checkpoint: ServedCheckpoint, tmp_path: Path) -> None:
    with started(checkpoint, tmp_path, Variant("far", latency_s=0.2), builtin=False) as origin:
        assert origin.server == "built-in"
        began = time.monotonic()
        get(origin, Range="bytes=0-0")
        assert time.monotonic() - began > 0.2


@pytest.mark.parametrize("builtin", SERVERS)
def test_nothing_listens_after_the_origin(checkpoint: ServedCheckpoint, tmp_path: Path, builtin: bool) -> None:
    with started(checkpoint, tmp_path, VARIANTS[0], builtin) as origin:
        assert get(origin)[0] == 200
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(origin)


def test_the_checkpoint_is_valid_safetensors_of_the_size_asked_for(checkpoint: ServedCheckpoint) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(checkpoint.root / BUCKET / KEY, framework="numpy") as file:
        names = list(file.keys())
    assert "model.embed_tokens.weight" in names
    assert len(names) > 3
    assert SIZE_BYTES <= checkpoint.size_bytes < SIZE_BYTES * 1.01


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-", (0, 10)),
        ("bytes=2-4", (2, 5)),
        ("bytes=2-400", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-30", (0, 10)),
        ("lines=1-2", None),
    ],
)
def test_range_headers(header: str | None, expected: tuple[int, int] | None) -> None:
    assert parse_range(header, 10) == expected


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=5-2", "bytes=-0"])
def test_range_headers_that_name_no_bytes(header: str) -> None:
    with pytest.raises(ValueError, match="bytes"):
        parse_range(header, 10)


@pytest.mark.parametrize("builtin", SERVERS)
def test_an_origin_counts_what_it_sends(checkpoint: ServedCheckpoint, tmp_path: Path, builtin: bool) -> None:
    with Origin(checkpoint.root, tmp_path / "scratch", VARIANTS[0], builtin=builtin, counting=True) as origin:
        assert origin.sent_bytes() == 0
        get(origin)
        get(origin, Range="bytes=0-99999")
        expected, deadline = checkpoint.size_bytes + 100_000, time.monotonic() + 60
        while origin.sent_bytes() < expected and time.monotonic() < deadline:  # the line may come after the answer
            time.sleep(0.02)
        assert expected <= origin.sent_bytes() < expected + 2_000  # nginx counts its headers, too
        assert origin.connections() == 1  # only the whole object is large
