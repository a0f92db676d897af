"""A real agent process: one fetch for many askers, read-only regions, and a budget that holds."""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import (
    ConfigError,
    ForbiddenError,
    NodeError,
    NodeRefusedError,
    ObjectNotFoundError,
    TooLargeError,
)
from medusa_runtime.node.client import NodeClient
from medusa_runtime.region.demand import pace
from medusa_runtime.region.layout import reopen
from medusa_runtime.region.reader import Region
from medusa_runtime.region.seals import F_ADD_SEALS
from process_tree import open_files

pytestmark = pytest.mark.forked

Start = Callable[..., Any]
Put = Callable[..., str]
MB = 1 << 20


def read_all(region: Region) -> dict[str, bytes]:
    index = region.wait_index(30)
    found = {}
    for name, entry in index.tensors.items():
        region.wait_tensor(name, 30)
        found[name] = bytes(region.shard(entry.shard)[entry.start : entry.stop])
    return found


def test_ten_askers_at_once_cause_one_fetch(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m", 4 * MB)
    node = start_node()
    clients = [node.client() for _ in range(10)]
    contents: list[dict[str, bytes]] = []

    def ask(client: NodeClient) -> None:
        region = client.region(url)
        contents.append(read_all(region))
        region.close()

    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(contents) == 10
    assert all(content == contents[0] for content in contents)
    assert contents[0]["model.layers.3.weight"] == bytes([3 + 1]) * (4 * MB // 8)
    (held,) = node.status()["regions"]
    assert (held["state"], held["in_use_by"], held["handed_out"]) == ("done", 10, 10)
    assert len([start for start, _ in origin.asked("/m/model.safetensors") if start == 0]) == 1, "one fetch"
    for client in clients:
        client.close()
    node.until(lambda: node.status()["regions"][0]["in_use_by"] == 0)


def test_a_region_can_be_read_and_nothing_else(start_node: Start, put_model: Put) -> None:
    client = start_node().client()
    region = client.region(put_model("m"))
    read_all(region)
    with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
        os.pwrite(region.fd, b"x", 8192)
    with pytest.raises(OSError, match=r"Permission|not permitted"):
        mmap.mmap(region.fd, 4096)
    # A user who may open the memfd again, for writing, can still not write.
    again = reopen(region.fd, os.O_RDWR)
    for attempt in (
        lambda: os.pwrite(again, b"x", 8192),
        lambda: mmap.mmap(again, 4096),
        lambda: os.ftruncate(again, 0),
    ):
        with pytest.raises(OSError, match="not permitted"):
            attempt()
    os.close(again)
    region.close()
    client.close()


CONFINED = """
set -e
mount --bind -o ro "$FOLDER" "$FOLDER"
! touch "$FOLDER/x" 2>/dev/null
exec setpriv --reuid=1000 --regid=1000 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""
ASK = """
import os, sys
from medusa_runtime.node.client import NodeClient
assert os.getuid() == 1000
client = NodeClient(sys.argv[1])
region = client.region(sys.argv[2])
index = region.wait_index(30)
names = list(index.order)
region.demand(names)
for name in names:
    region.wait_tensor(name, 30)
entry = index.tensors[names[0]]
print(region.shard(0)[entry.start], region.file("config.json").decode())
try:
    os.close(os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR))
    print("opened for writing")
except PermissionError:
    print("refused")
"""


def may_confine() -> bool:
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    return subprocess.run(["unshare", "--mount", "mount", "-o", "remount,bind,ro", "/"], check=False).returncode == 0


@pytest.mark.root
@pytest.mark.skipif(not may_confine(), reason="needs root, unshare and setpriv to make the confinement")
def test_user_1000_reads_through_a_read_only_mount(start_node: Start, put_model: Put) -> None:
    url = put_model("m")
    node = start_node("--allow", f"{url}=1000")
    command = ["unshare", "--mount", "sh", "-c", CONFINED, "sh", sys.executable, "-c", ASK, node.socket, url]
    done = subprocess.run(
        command,
        env={**os.environ, "FOLDER": str(node.folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == '1 {"model_type": "m"}\nrefused\n', done.stderr


def test_what_a_forward_waits_for_comes_first(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m", 32 * MB)
    origin.bytes_per_s = 2e6
    client = start_node("--connections", "1").client()
    region = client.region(url)
    index = region.wait_index(30)
    last = index.order[-1]
    while not region.has(last):
        region.demand([last])
        time.sleep(0.01)
        assert region.progress().state == "fetching"
    assert not all(region.has(name) for name in index.order)
    region.close()
    client.close()


def test_layers_of_a_worker_come_first(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m", 24 * MB)
    origin.bytes_per_s = 8e6
    client = start_node("--connections", "1").client()
    with pytest.raises(NodeError, match="layers: expected START:STOP"):
        client.region(url, layers="8:0")
    region = client.region(url, layers="6:8")
    order = region.wait_index(30).order
    for name in order[:2]:
        region.wait_tensor(name, 30)
    assert sorted(order[:2]) == sorted(order)[6:8]
    assert region.progress().fetched_bytes < 12 * MB
    region.close()
    client.close()


@pytest.mark.parametrize("waits", [False, True])
def test_what_nobody_waits_for_gives_way(start_node: Start, put_model: Put, origin: Any, waits: bool) -> None:
    first, second = put_model("first", 24 * MB), put_model("second", 24 * MB)
    origin.bytes_per_s = 5e5  # a connection, so that the first does not end before the second has begun
    node = start_node("--connections", "4")
    ours, functions, another = node.client(), node.client(), node.client()
    early = ours.region(first, background=True)
    late = functions.region(second)
    if waits:
        another.region(first).close()
    origin.bytes_per_s = 4e6
    while "fetching" == early.progress().state == late.progress().state:
        time.sleep(0.01)
    assert (early.progress().fetched_bytes >= 16 * MB) == waits, "what gives way has what was under way, 12 MB"
    for region in (early, late):
        assert len(read_all(region)) == 8
        region.close()
    for client in (ours, functions, another):
        client.close()


def test_nonsense_in_the_ring_hurts_nobody(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m", 8 * MB)
    origin.bytes_per_s = 8e6
    client = start_node().client()
    region = client.region(url)
    assert os.pwrite(region.demand_fd, b"\xff" * 512, 512) == 512
    pace(region.demand_fd, 0.0, 3600.0)  # heeded only for workers of groups
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(region.demand_fd, 0)
    assert len(read_all(region)) == 8
    region.close()
    client.close()


def test_the_least_recently_used_goes_first_and_one_in_use_never(start_node: Start, put_model: Put) -> None:
    urls = [put_model(name, 4 * MB) for name in ("a", "b", "c", "d")]
    node = start_node("--memory-budget", "9MB")

    def have(url: str) -> None:
        client = node.client()
        read_all(client.region(url))
        client.close()
        node.until(lambda: all(held["in_use_by"] == 0 for held in node.status()["regions"]))

    def held() -> set[str]:
        return {region["url"][-1] for region in node.status()["regions"]}

    have(urls[0])
    have(urls[1])
    have(urls[0])
    have(urls[2])
    assert held() == {"a", "c"}
    users = [node.client(), node.client()]
    regions = [users[0].region(urls[0]), users[1].region(urls[2])]
    asker = node.client()
    with pytest.raises(TooLargeError, match=r"takes 4 MB of memory; expected .* budget of 9 MB, of which 8 MB are in"):
        asker.region(urls[3])
    assert held() == {"a", "c"}
    assert len(read_all(regions[0])) == len(read_all(regions[1])) == 8
    users[1].close()
    node.until(lambda: sum(region["in_use_by"] for region in node.status()["regions"]) == 1)
    read_all(asker.region(urls[3]))
    assert held() == {"a", "d"}
    assert len(read_all(regions[1])) == 8, "what was evicted stays with those who have it"
    for client in (users[0], asker):
        client.close()


def test_the_memory_of_what_is_evicted_is_taken_back_by_a_child(start_node: Start, put_model: Put) -> None:
    """It takes the kernel a second for gigabytes, in which the agent would answer nobody."""
    url, large = put_model("m"), put_model("large", 40 * MB)
    node = start_node("--memory-budget", "42MB", "--log-level", "debug")

    def have(url: str) -> None:
        client = node.client()
        read_all(client.region(url))
        client.close()
        node.until(lambda: all(held["in_use_by"] == 0 for held in node.status()["regions"]))

    have(large)
    have(put_model("other", 8 * MB))
    assert re.search(rf"process \d+ takes back the memory of {large}", node.output())
    have(url)
    assert node.output().count("takes back") == 1, "of little it is the agent that does"
    node.until(lambda: node.children() == {})
    held = [number for number, file in open_files(node.process.pid).items() if "medusa-region" in file]
    assert len({os.stat(f"/proc/{node.process.pid}/fd/{number}").st_ino for number in held}) == 2


def test_a_pinned_model_stays_without_users(start_node: Start, put_model: Put) -> None:
    pinned, other = put_model("a", 4 * MB), put_model("b", 4 * MB)
    node = start_node("--memory-budget", "6MB", "--pin", pinned)
    node.until(lambda: [held["state"] for held in node.status()["regions"]] == ["done"])
    client = node.client()
    with pytest.raises(TooLargeError):
        client.region(other)
    client.drop(pinned)
    read_all(client.region(other))
    assert [held["url"] for held in node.status()["regions"]] == [other]
    client.close()


def test_a_checkpoint_larger_than_the_budget(start_node: Start, put_model: Put) -> None:
    client = start_node("--memory-budget", "1MB").client()
    with pytest.raises(TooLargeError, match="expected at most the node agent's budget of 1 MB; raise --memory-budget"):
        client.region(put_model("m", 4 * MB))
    client.close()


def test_a_quota_holds_below_its_prefix(start_node: Start, put_model: Put, origin: Any) -> None:
    urls = [put_model(name, 4 * MB) for name in ("team/a", "team/b", "teams")]
    node = start_node("--quota", f"{origin.url}/team=6MB")
    clients = [node.client() for _ in urls]
    read_all(clients[0].region(urls[0]))
    with pytest.raises(NodeRefusedError, match=r"the quota of 6 MB .* of which 4 MB are in use"):
        clients[1].region(urls[1])
    read_all(clients[2].region(urls[2]))
    clients[0].close()
    node.until(lambda: all(held["in_use_by"] == 0 for held in node.status()["regions"] if "team/" in held["url"]))
    read_all(clients[1].region(urls[1]))
    assert {held["url"] for held in node.status()["regions"]} == {urls[1], urls[2]}
    for client in clients:
        client.close()


def test_a_prefix_that_may_not_be_read(start_node: Start, put_model: Put, origin: Any) -> None:
    allowed, other, secret = put_model("mine/a"), put_model("mine-not"), put_model("theirs/a")
    node = start_node("--allow", f"{origin.url}/mine/", "--allow", f"{origin.url}/theirs=54321")
    client = node.client()
    assert len(read_all(client.region(allowed))) == 8
    with pytest.raises(NodeRefusedError, match=r"mine-not may not be had .* expected a model below .*/mine/"):
        client.region(other)
    with pytest.raises(NodeRefusedError, match="expected another user"):
        client.region(secret)
    with pytest.raises(NodeError, match=r"without '\.\.'"):
        client.region(f"{origin.url}/mine/../theirs/a")
    assert not origin.asked("/theirs/a/model.safetensors")
    client.close()


@pytest.mark.parametrize("opened", [False, True])
def test_an_origin_sends_nobody_past_the_rules(start_node: Start, put_model: Put, origin: Any, opened: bool) -> None:
    """A redirect once led an agent that serves others to any address of its network."""
    url, _ = put_model("mine/a"), put_model("internal")
    elsewhere = origin.url.replace("127.0.0.1", "localhost") + "/internal"
    for name in ("model.safetensors", "config.json"):
        origin.redirects[f"/mine/a/{name}"] = f"{elsewhere}/{name}"
    rules = ["--allow", f"{origin.url}/mine/", *(["--allow", elsewhere] if opened else [])]
    client = start_node(*rules).client()
    if opened:
        assert len(read_all(client.region(url))) == 8
    else:
        with pytest.raises(ForbiddenError, match=r"redirected to http://localhost.*--allow"):
            client.region(url)
        assert not origin.asked("/internal/model.safetensors")
        assert not origin.asked("/internal/config.json")
    client.close()


def test_what_the_store_answers_reaches_the_asker(start_node: Start, origin: Any) -> None:
    node = start_node()
    client = node.client()
    with pytest.raises(ObjectNotFoundError, match="nothing-here"):
        client.region(f"{origin.url}/nothing-here")
    node.until(lambda: node.status()["regions"] == [])
    client.close()


def test_an_object_is_fetched_again_when_asked(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m")
    client = start_node().client()
    before = read_all(client.region(url))
    origin.objects["/m/model.safetensors"] = origin.objects["/m/model.safetensors"].replace(b"\1" * 64, b"\7" * 64)
    assert read_all(client.region(url)) == before
    assert read_all(client.region(url, fresh=True)) != before
    client.close()


def test_an_object_that_was_replaced_is_noticed(start_node: Start, put_model: Put, origin: Any) -> None:
    url, other = put_model("m"), put_model("other")
    node = start_node("--look-every-s", "0.2")
    client, second = node.client(), node.client()
    region = client.region(url)
    before = read_all(region)
    read_all(second.region(other))
    origin.objects["/m/model.safetensors"] = origin.objects["/m/model.safetensors"].replace(b"\1" * 64, b"\7" * 64)
    node.until(lambda: [held["url"] for held in node.status()["regions"]] == [other])
    assert read_all(region) == before, "those who have the old one keep it"
    assert read_all(second.region(url)) != before
    origin.accept = lambda headers, path: False
    origin.requests.clear()
    node.until(lambda: len({name for name, *_ in origin.requests if name.endswith("model.safetensors")}) == 2)
    assert {held["url"] for held in node.status()["regions"]} == {url, other}, "a store that refuses says nothing"
    unknown = [f"it is not known whether {name} has changed in its store" for name in (url, other)]
    node.until(lambda: all(text in node.output() for text in unknown))
    origin.requests.clear()
    node.until(lambda: min(len(origin.asked(f"/{name}/model.safetensors")) for name in ("m", "other")) >= 4)
    assert [node.output().count(text) for text in unknown] == [1, 1]
    origin.accept = lambda headers, path: True
    node.until(lambda: node.output().count("can be checked again") == 2)
    region.close()


@pytest.fixture
def folder(tmp_path: Path, safetensors_file: Callable[..., bytes]) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(safetensors_file({"w": ("U8", [64], b"\1" * 64)}))
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "m"}))
    return tmp_path / "model"


def test_local_files_are_mapped_from_where_both_see_them(start_node: Start, folder: Path) -> None:
    node = start_node()
    client = node.client()
    region = client.region(str(folder))
    assert read_all(region) == {"w": b"\1" * 64}
    assert region.file("config.json") == b'{"model_type": "m"}'
    assert 0 < node.status()["used_bytes"] < 32768, "the index and the small files; the weights are the page cache's"
    # A new version of the file is not mistaken for the old one.
    path = folder / "model.safetensors"
    (folder / "new").write_bytes(path.read_bytes().replace(b"\1" * 64, b"\2" * 64))
    os.replace(folder / "new", path)
    assert read_all(client.region(str(folder))) == {"w": b"\2" * 64}
    client.close()


def test_a_local_folder_must_be_seen_by_the_asker(start_node: Start, folder: Path) -> None:
    """The agent reads what it may; a function gets only what is in the folder that it has opened itself."""
    client = start_node().client()
    file = os.open(folder / "config.json", os.O_RDONLY)
    no_right_to_read = os.open(folder, os.O_PATH)
    for descriptors in ((), (file,), (no_right_to_read,)):
        with pytest.raises(NodeRefusedError, match="expected the checkpoint's folder, opened for reading"):
            client._request("region", {"url": str(folder)}, descriptors)
    os.close(file)
    os.close(no_right_to_read)
    client.close()


def test_sealed_regions_take_no_other_seal_away(start_node: Start, put_model: Put) -> None:
    """A function can add a seal at most where it may write, and it may not."""
    import fcntl

    client = start_node().client()
    region = client.region(put_model("m"))
    read_all(region)
    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(region.fd, F_ADD_SEALS, 1)
    region.close()
    client.close()


def test_a_budget_that_is_no_size() -> None:
    from medusa_runtime.node.settings import node_settings

    with pytest.raises(ConfigError, match=r"--memory-budget='lots' cannot be used: expected a size above 0"):
        node_settings({}, {"memory_budget_bytes": "lots"})


def test_a_pinned_model_is_fetched_when_its_store_answers_at_last(
    start_node: Start, put_model: Put, origin: Any
) -> None:
    url = put_model("m")
    origin.accept = lambda headers, path: False
    node = start_node("--pin", url)
    node.until(lambda: f"{url} could not be fetched" in node.output() and node.status()["regions"] == [])
    origin.accept = lambda headers, path: True
    node.until(lambda: [held["state"] for held in node.status()["regions"]] == ["done"])
    assert node.status()["regions"][0]["pinned"]
    node.client().drop(url)
    assert node.status()["regions"] == []


def test_who_is_refused_by_a_quota_evicts_nothing(start_node: Start, put_model: Put, origin: Any) -> None:
    first, second, other = (put_model(name, 4 * MB) for name in ("team/a", "team/b", "other"))
    node = start_node("--quota", f"{origin.url}/team=6MB", "--memory-budget", "9MB")
    with closing(node.client()) as client:
        read_all(client.region(other))
    client = node.client()
    read_all(client.region(first))
    with pytest.raises(NodeRefusedError, match="the quota of 6 MB"):
        node.client().region(second)
    status = node.status()
    assert {held["url"] for held in status["regions"]} == {first, other}
    assert status["refused"] == {"Node.Refused": 1}


def test_ten_ask_for_two_models_where_there_is_room_for_one(start_node: Start, put_model: Put) -> None:
    urls = [put_model(name, 4 * MB) for name in ("a", "bb")]
    node = start_node("--memory-budget", "5MB")
    clients = [node.client() for _ in range(10)]
    found: dict[int, object] = {}

    def ask(number: int) -> None:
        try:
            with closing(clients[number].region(urls[number % 2])) as region:
                found[number] = read_all(region)["model.layers.0.weight"][0]
        except TooLargeError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [{found[number] for number in range(10) if number % 2 == model} for model in (0, 1)]
    had = [model for model in (0, 1) if answers[model] == {len(urls[model].rpartition("/")[2])}]
    assert len(had) == 1, "one model, whole and right, for all who asked for it"
    assert all("budget of 5 MB, of which 4 MB are in use" in str(text) for text in answers[1 - had[0]])
    (held,) = node.status()["regions"]
    assert (held["url"], held["in_use_by"]) == (urls[had[0]], 5)
    for client in clients[had[0] :: 2]:
        client.close()
    node.until(lambda: node.status()["regions"][0]["in_use_by"] == 0)
    assert read_all(clients[1 - had[0]].region(urls[1 - had[0]]))
    assert [held["url"] for held in node.status()["regions"]] == [urls[1 - had[0]]]
