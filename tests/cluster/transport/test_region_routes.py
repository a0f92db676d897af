"""A node server's routes for peers, over real connections: hostile requests, and regions that come late or never."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from aiohttp import web
from medusa_cluster.connections import require_token
from medusa_cluster.transport.pacing import Pacer, mark_serving, mark_weights
from medusa_cluster.transport.regions import RegionRoutes
from medusa_runtime.checkpoint.index import Shard, TensorEntry, WeightIndex
from medusa_runtime.errors import ObjectNotFoundError, StorageError
from medusa_runtime.region.checksummed import ChecksummedRegion
from medusa_runtime.region.layout import Word
from medusa_runtime.region.reader import Region
from medusa_runtime.region.writer import RegionWriter
from medusa_runtime.storage.framing import PEER_CHUNK_BYTES, import_xxh3_64
from medusa_runtime.storage.peer import PeerStore
from medusa_runtime.storage.peer_access import PeerAccess
from waiting import until

CHUNK = PEER_CHUNK_BYTES[0]
COUNT = 6
START = 100
SIZE = COUNT * CHUNK - 1000
URL = "s3://bucket/model"
TOKEN = "0123456789abcdef"
_SIOCOUTQNSD = 0x894B  # bytes that the kernel has taken and not sent yet
ALL = f"start={START}&stop={START + SIZE}"
SHARD = f"/regions/{quote(URL, safe='')}/shards/model.safetensors"


class Served:
    """A region of one tensor behind a server in a thread. ``arrive`` publishes chunks."""

    def __init__(self, size: int = SIZE) -> None:
        self.data = os.urandom(size)
        index = WeightIndex(
            [Shard("model.safetensors", START + size, START, '"v1"')], {"w": TensorEntry(0, 0, size, "U8", (size,))}
        )
        self.region = Region.create()
        self.writer: RegionWriter = self.region.writer()
        self.writer.lay_out(index, {"config.json": b"{}", ".medusa/kv-plan": b"private"}, {}, CHUNK)
        self.served = ChecksummedRegion(Region(os.dup(self.region.fd)))
        self.there = 0
        self.using = 0
        self.pacer = Pacer()
        self.routes = RegionRoutes(self, self.pacer)
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait(120)
        self.stores: list[PeerStore] = []

    async def acquire(self, url: str, *, current: bool, within_s: float) -> ChecksummedRegion | None:
        if url != URL:
            return None
        self.using += 1
        return self.served

    def release(self, region: ChecksummedRegion) -> None:
        assert region is self.served
        self.using -= 1

    def arrive(self, count: int) -> None:
        for chunk in range(self.there, self.there + count):
            piece = memoryview(self.data)[chunk * CHUNK : (chunk + 1) * CHUNK]
            with self.writer.buffer(chunk) as buffer:
                buffer[:] = piece
            self.writer.publish(chunk, import_xxh3_64()(piece))
        self.there += count

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def store(self) -> PeerStore:
        self.stores.append(PeerStore(self.url, URL, PeerAccess(TOKEN), None))
        return self.stores[-1]

    def ask(self, path: str, token: str = TOKEN, **headers: str) -> int:
        """The status of the answer to a GET."""
        request = urllib.request.Request(self.url + path, headers=headers)
        request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=240) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        application = web.Application(middlewares=[require_token(TOKEN)])
        application.add_routes(self.routes.routes())
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.writer.close()
        self.served.close()
        self.region.close()


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


def test_a_region_that_cannot_be_mapped_leaves_nothing_open(served: Served) -> None:
    os.pwrite(served.region.fd, (1 << 60).to_bytes(8, "little"), 8 * Word.DATA_OFFSET)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="mmap length is greater than file size"):
        ChecksummedRegion(Region(os.dup(served.region.fd)))
    assert os.listdir("/proc/self/fd") == before


def test_a_range_is_sent_as_its_chunks_arrive(served: Served) -> None:
    buffer, came = bytearray(SIZE), list[int]()
    store = served.store()
    read = threading.Thread(
        target=store.read_chunks,
        args=("model.safetensors", START, memoryview(buffer), '"v1"', lambda chunk: came.append(chunk.filled)),
        kwargs={"chunk_bytes": CHUNK},
    )
    read.start()
    for there in range(1, COUNT + 1):
        served.arrive(1)
        until(lambda there=there: len(came) == there)
    read.join()
    assert bytes(buffer) == served.data
    assert came == [*(CHUNK * number for number in range(1, COUNT)), SIZE]
    assert served.routes.sent_bytes == SIZE


def test_a_chunk_that_a_peer_waits_for_is_fetched_first(served: Served) -> None:
    def read() -> None:
        with contextlib.suppress(StorageError):
            served.store().read_chunks(
                "model.safetensors",
                START + 4 * CHUNK,
                memoryview(bytearray(CHUNK)),
                '"v1"',
                lambda chunk: None,
                chunk_bytes=CHUNK,
            )

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: served.writer.demanded() == [range(4, 5)])
    served.arrive(5)
    thread.join()


def test_the_offer_has_the_index_and_the_checkpoint_s_own_files(served: Served) -> None:
    found = served.store().read_index()
    assert found is not None
    assert found.files == {"config.json": b"{}"}
    assert WeightIndex.from_json(found.index_text) == served.served.index
    assert found.chunk_bytes == CHUNK
    assert served.store().read_index(most_bytes=10) is None
    assert served.store().progress() == ("indexed", 0, 0)


def test_a_fetch_that_fails_ends_the_answer(served: Served) -> None:
    served.arrive(2)
    came = list[int]()
    threading.Timer(0.3, served.writer.fail, [StorageError("gone")]).start()
    with pytest.raises(StorageError):
        served.store().read_chunks(
            "model.safetensors",
            START,
            memoryview(bytearray(SIZE)),
            '"v1"',
            lambda chunk: came.append(chunk.filled),
            chunk_bytes=CHUNK,
        )
    assert came == [CHUNK, 2 * CHUNK]
    until(lambda: not served.using)


def test_a_prefetcher_that_ended_ends_the_answer(served: Served) -> None:
    served.arrive(1)
    served.writer.close()
    with pytest.raises(StorageError):
        served.store().read_chunks(
            "model.safetensors", START, memoryview(bytearray(SIZE)), '"v1"', lambda chunk: None, chunk_bytes=CHUNK
        )


def test_a_region_without_the_model_is_not_found(served: Served) -> None:
    served.stores.append(PeerStore(served.url, "s3://bucket/other", PeerAccess(TOKEN), None))
    with pytest.raises(ObjectNotFoundError):
        served.stores[-1].read_index()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{SHARD}?start={START}&stop={START}", 416),
        (f"{SHARD}?start={START + 1}&stop={START + CHUNK}", 416),
        (f"{SHARD}?start={START}&stop={START + CHUNK + 1}", 416),
        (f"{SHARD}?start=0&stop={START + CHUNK}", 416),
        (f"{SHARD}?start={START}&stop={START + SIZE + 1}", 416),
        (f"{SHARD}?start={START + CHUNK}&stop={START}", 416),
        (f"{SHARD}?start={START}&stop={9 * 10**17}", 416),
        (f"{SHARD}?start={START}&stop={'9' * 5000}", 400),
        (f"{SHARD}?start=-5&stop=5", 400),
        (f"{SHARD}?start=%C2%B2&stop=5", 400),
        (f"{SHARD}?stop=5", 400),
        (SHARD, 400),
        (f"{SHARD.replace('model.safetensors', '..%2f..%2fetc%2fpasswd')}?start=0&stop=5", 404),
        ("/regions/%2Fetc%2Fpasswd/index", 404),
        ("/regions/memory%3A%2F%2Fx/index", 400),
        ("/regions/s3%3A%2F%2Fbucket%2F..%2Fx/index", 400),
        ("/regions/%00/index", 400),
        ("/regions/%FF/index", 400),
        (f"/regions/{quote(URL, safe='')}/index?most=-1", 400),
    ],
)
def test_malformed_requests_are_refused(served: Served, path: str, status: int) -> None:
    assert served.ask(path) == status
    assert not served.using


def test_only_who_knows_the_token_is_answered(served: Served) -> None:
    progress = f"/regions/{quote(URL, safe='')}/progress"
    assert served.ask(progress) == 200
    for token in ("", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é"):
        assert served.ask(progress, quote(token)) == 401
    assert served.ask("/nothing", "wrong") == 401


def test_another_version_is_not_sent(served: Served) -> None:
    served.arrive(COUNT)
    path = f"{SHARD}?{ALL}"
    assert served.ask(path, **{"If-Match": '"%22v1%22"'}) == 200
    assert served.ask(path, **{"If-Match": '"%22v2%22"'}) == 412


def test_noise_neither_ends_nor_fills_the_server(served: Served) -> None:
    served.arrive(COUNT)
    right = f"GET {SHARD}?{ALL} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    chance = random.Random(7)
    for _ in range(150):
        noise = bytearray(right.encode())
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(noise))
            noise[at : at + chance.choice((0, 1, 4))] = chance.randbytes(chance.choice((1, 1, 8)))
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.settimeout(0.05)
            connection.sendall(noise)
            with contextlib.suppress(OSError):
                connection.recv(100)
    until(lambda: not served.using)
    assert served.store().progress() == ("indexed", SIZE, SIZE)


def test_a_peer_that_goes_while_it_waits_is_let_go(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        head = f"GET {SHARD}?{ALL} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000)
        until(lambda: served.using == 1)
    until(lambda: not served.using)


def test_too_many_requests_of_one_peer_are_refused(served: Served) -> None:
    head = f"GET {SHARD}?{ALL} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            connection.sendall(head.encode())
        until(lambda: served.using == 64)
        assert served.ask(f"/regions/{quote(URL, safe='')}/progress") == 503
    until(lambda: not served.using)


def test_a_pace_is_shared_and_can_be_changed_while_weights_flow() -> None:
    left, right = socket.socket(), socket.socket()
    with left, right:
        pacer = Pacer(80e6)
        with pacer.sending(left):
            assert _pace(left) == 80_000_000
            with pacer.sending(right):
                assert _pace(left) == _pace(right) == 40_000_000
                pacer.set(10e6)
                assert _pace(left) == _pace(right) == 5_000_000
            assert _pace(left) == 10_000_000
            pacer.set(None)
            assert _pace(left) > 1 << 60
            pacer.set(1e6)
            assert pacer.bytes_per_s == 1e6
        mark_serving(left)
        assert left.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6
        assert left.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0xB8


@pytest.mark.skipif(
    os.geteuid() != 0 or "cubic" not in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(),
    reason="this machine may not allow CUBIC",
)
def test_weights_are_sent_by_cubic_and_what_is_served_as_the_machine_does() -> None:
    weights, serving = socket.socket(), socket.socket()
    with weights, serving:
        usual = serving.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        mark_weights(weights)
        mark_serving(serving)
        assert weights.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"cubic"
        assert serving.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == usual


def test_an_answer_without_a_limit_has_been_sent_when_the_next_one_begins() -> None:
    """Else megabytes of it would share the link with the chunks behind them, and come later for that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender, reader = socket.create_connection(listener.getsockname()), listener.accept()[0]
    with sender, reader:
        sender.setblocking(False)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        with Pacer().sending(sender):
            _fill(sender)
            assert _unsent_bytes(sender) > 128 << 10
            reading = threading.Timer(0.2, _read, (reader,))
            reading.start()
        assert _unsent_bytes(sender) < 64 << 10
        sender.shutdown(socket.SHUT_WR)
        reading.join()


def test_a_paced_answer_has_been_sent_when_the_next_one_begins() -> None:
    """Bytes that wait in the kernel would be sent in addition to the next connection's share of the pace."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender, reader = socket.create_connection(listener.getsockname()), listener.accept()[0]
    with sender, reader:
        sender.setblocking(False)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        pacer = Pacer(2e6)
        with pacer.sending(sender):
            _fill(sender)
            assert 64 << 10 < _unsent_bytes(sender) < 128 << 10
            reading = threading.Thread(target=_read, args=(reader,))
            reading.start()
        assert _unsent_bytes(sender) < 64 << 10
        pacer.set(None)
        with pacer.sending(sender):  # a connection that was paced in an earlier answer
            assert _pace(sender) > 1 << 60
            assert sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 0
        sender.shutdown(socket.SHUT_WR)
        reading.join()


def _pace(connection: socket.socket) -> int:
    return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, 47, 8), "little")


def _unsent_bytes(sender: socket.socket) -> int:
    """Return how much the kernel has taken and not sent yet."""
    return int(struct.unpack("i", fcntl.ioctl(sender, _SIOCOUTQNSD, bytes(4)))[0])


def _fill(sender: socket.socket) -> None:
    """Send as much as the kernel takes."""
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(16 << 10))


def _read(reader: socket.socket) -> None:
    while reader.recv(1 << 20):
        pass


@pytest.mark.slow
def test_a_reader_that_takes_nothing_is_given_up() -> None:
    served = Served(48 << 20)  # more than the kernel holds for a connection
    try:
        served.arrive(192)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", served.port))
            path = f"{SHARD}?start={START}&stop={START + (48 << 20)}"
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            until(lambda: served.using == 1)
            until(lambda: served.using == 0)
    finally:
        served.close()
