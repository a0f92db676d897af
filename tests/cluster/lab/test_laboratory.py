"""Laboratories: real namespaces, links and processes, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from medusa_cluster.lab.laboratory import Laboratory
from medusa_runtime.errors import ConfigError, LabError
from process_tree import alive, descendants, stopped
from waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
]

_MB = 1_000_000
OWN = {max(os.sched_getaffinity(0))}  # processors of n3


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "weights").write_bytes(os.urandom(2 * _MB))
    with Laboratory(3, "160mbit", cpus=0.5, cores={"n3": OWN}, origin={"model": folder}) as laboratory:
        yield laboratory


def rate_of(lab: Laboratory, *flows: tuple[str, str], size_bytes: int = 16 * _MB) -> list[float]:
    """Send so many bytes from node to node, all flows at once; their MB/s at the receivers."""
    rates = [0.0] * len(flows)

    def receive(server: socket.socket, number: int) -> None:
        with server, server.accept()[0] as connection:
            count, began = len(connection.recv(1 << 16)), time.perf_counter()
            while piece := connection.recv(1 << 18):
                count += len(piece)
            assert count == size_bytes
            rates[number] = count / (time.perf_counter() - began) / 1e6

    def send(node: str, to: tuple[str, int]) -> None:
        with lab.network(node):
            connection = socket.create_connection(to)
        with connection:
            connection.sendall(bytes(size_bytes))

    threads = []
    for number, (sender, receiver) in enumerate(flows):
        with lab.network(receiver):
            server = socket.create_server((lab.address(receiver), 0))
        threads.append(threading.Thread(target=receive, args=(server, number)))
        threads.append(threading.Thread(target=send, args=(sender, server.getsockname())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rates


def test_a_link_carries_its_rate_in_each_direction(lab: Laboratory) -> None:
    # The machine may be too busy to fill the links; it cannot make them faster.
    best = [0.0, 0.0]
    for _ in range(5):
        found = rate_of(lab, ("n1", "n2"), ("n2", "n1"))
        assert max(found) < 20 * 1.06
        best = [max(pair) for pair in zip(best, found, strict=True)]
        if min(best) > 20 * 0.7:
            return
    pytest.fail(f"links of 20 MB/s carried {best}")


def test_senders_share_the_link_of_their_receiver(lab: Laboratory) -> None:
    assert sum(rate_of(lab, ("n1", "n3"), ("n2", "n3"))) < 20 * 1.25  # the second one ends alone


def test_what_a_node_sends_is_counted(lab: Laboratory) -> None:
    before = lab.sent_bytes("n1"), lab.received_bytes("n3"), lab.sent_bytes("n2")
    rate_of(lab, ("n1", "n3"), size_bytes=4 * _MB)
    sent = [lab.sent_bytes("n1") - before[0], lab.received_bytes("n3") - before[1]]
    assert all(4 * _MB < count < 4.5 * _MB for count in sent)
    assert lab.sent_bytes("n2") - before[2] < 10_000


def test_a_cut_link_carries_nothing_and_connections_live_through_it(lab: Laboratory) -> None:
    with lab.network("n2"):
        server = socket.create_server((lab.address("n2"), 0))
    with lab.network("n1"):
        client = socket.create_connection(server.getsockname())
    with server, client, server.accept()[0] as accepted:
        lab.cut("n1")
        client.sendall(b"late")
        accepted.settimeout(0.5)
        with pytest.raises(TimeoutError):
            accepted.recv(4)
        lab.restore("n1")
        accepted.settimeout(30)
        assert accepted.recv(4) == b"late"


def test_a_node_has_its_own_processes_name_and_memory_files(lab: Laboratory) -> None:
    script = (
        'hostname; touch /dev/shm/mine; ls /dev/shm; listed=$(ps ax); echo "$listed" | grep -c python; getent hosts n2'
    )
    shown = lab.run("n1", ["sh", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert shown[:3] == ["n1", "mine", "1"]  # the node's first process
    assert shown[3:] == [lab.address("n2"), "n2"]
    assert not Path("/dev/shm/mine").exists()


def test_programs_have_our_streams_folder_and_exit_status(lab: Laboratory, tmp_path: Path) -> None:
    ran = lab.run("n1", ["sh", "-c", "cat; pwd; exit 7"], input=b"given\n", capture_output=True, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (7, f"given\n{tmp_path}\n".encode())
    missing = lab.run("n1", ["/nowhere"], capture_output=True, text=True)
    assert (missing.returncode, missing.stderr) == (127, "/nowhere: No such file or directory\n")


def test_signals_reach_the_program(lab: Laboratory) -> None:
    script = "trap 'echo ended; exit 5' TERM; echo up; while :; do sleep 0.1; done"
    with lab.popen("n2", ["sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.stdout.read() == "ended\n"
        assert process.wait() == 5
    killed = lab.popen("n2", ["sleep", "1000"])
    until(lambda: "sleep 1000" in lab.processes("n2").values())
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    until(lambda: not lab.processes("n2"))


def test_processes_of_a_node_can_be_found_and_stopped(lab: Laboratory) -> None:
    process = lab.popen("n3", ["sleep", "1000"])
    until(lambda: "sleep 1000" in lab.processes("n3").values())
    (pid,) = lab.processes("n3")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stopped(pid))
    os.kill(pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_the_origin_serves_ranges_and_counts(lab: Laboratory) -> None:
    before = lab.origin_sent_bytes
    fetched = lab.run(
        "n1", ["curl", "-s", "-r", "100-199", f"{lab.origin_url}/model/weights"], capture_output=True, check=True
    )
    folder = next(iter(lab.served.values()))
    assert fetched.stdout == (folder / "weights").read_bytes()[100:200]
    assert 100 < lab.origin_sent_bytes - before < 5000


def test_a_port_of_this_machine_leads_into_the_laboratory(lab: Laboratory) -> None:
    url = lab.forward(0, "origin", 80)
    with urllib.request.urlopen(f"{url}/model/weights") as answer:
        assert len(answer.read()) == 2 * _MB
    port = url.rpartition(":")[2]
    with pytest.raises(LabError, match=f"port {port} of 127.0.0.1 cannot be opened"):
        lab.forward(int(port), "origin", 80)


def test_a_crashed_node_comes_back_empty() -> None:
    with Laboratory(1) as laboratory:
        process = laboratory.popen("n1", ["sleep", "1000"])
        until(lambda: laboratory.processes("n1"))
        (laboratory.node_folder("n1") / "mine").touch()
        pids = [laboratory.pid("n1"), *laboratory.processes("n1")]
        laboratory.crash("n1")
        assert process.wait() == -signal.SIGKILL
        assert not any(alive(pid) for pid in pids)
        laboratory.boot("n1")
        assert not laboratory.processes("n1")
        assert not (laboratory.node_folder("n1") / "mine").exists()
        laboratory.run("n1", ["true"], check=True)
        with pytest.raises(LabError, match="n1 runs already"):
            laboratory.boot("n1")


def test_processor_time_is_limited_where_the_machine_can(lab: Laboratory) -> None:
    if "cores for each node" not in lab.quotas:
        assert lab.quotas.startswith("no processor quotas here:")
        pytest.skip(lab.quotas)
    program = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    ran = lab.run("n1", [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 0.8


def test_a_node_may_have_processors_of_its_own(lab: Laboratory) -> None:
    everywhere = os.sched_getaffinity(0)
    program = [sys.executable, "-S", "-c", "import os; print(os.sched_getaffinity(0))"]
    found = [lab.run(node, program, capture_output=True, text=True, check=True).stdout for node in ("n2", "n3")]
    assert found == [f"{everywhere}\n", f"{OWN}\n"]
    assert os.sched_getaffinity(0) == everywhere


_LEFT_ALONE = """
import sys, time
from medusa_cluster.lab.laboratory import Laboratory
with Laboratory(2, "100mbit", cpus=0.5, origin={"model": "."}) as lab:
    lab.popen("n1", ["sh", "-c", "sleep 1000 & sleep 1000"])
    print(lab.forward(0, "origin", 80), lab.folder, lab.origin.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_laboratory_that_is_killed(number: signal.Signals) -> None:
    interfaces, groups, namespaces = names("/sys/class/net"), cgroups(), names("/run/netns")
    process = subprocess.Popen([sys.executable, "-c", _LEFT_ALONE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url, folder, _ = process.stdout.readline().split()
        assert names("/sys/class/net") == interfaces  # nor is anything of it ours while it runs
        urllib.request.urlopen(f"{url}/model/pyproject.toml").close()
        started = descendants(process.pid)
        until(lambda: sum(name == "sleep" for name in descendants(process.pid).values()) == 2)
        started |= descendants(process.pid)
        process.send_signal(number)
        process.wait()
        until(lambda: not any(alive(pid) for pid in started))
        until(lambda: not Path(folder).exists())
        until(lambda: cgroups() == groups)
        assert names("/run/netns") == namespaces
    finally:
        process.kill()
        process.communicate()


def names(folder: str) -> set[str]:
    """The names in a folder, without those of containers, which may come and go beside this test."""
    found = set(os.listdir(folder)) if Path(folder).is_dir() else set()
    return {name for name in found if not name.startswith(("veth", "cni-", "netns-", "podman"))}


def cgroups() -> set[str]:
    found = set()
    for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/unified"):
        with contextlib.suppress(OSError):
            found |= {name for name in os.listdir(mount) if name.startswith("medusa-lab-")}
    return found


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Laboratory(0), "--nodes: expected a number from 1 to 64, found 0"),
        (lambda: Laboratory(65), "--nodes: expected"),
        (lambda: Laboratory(2, "fast"), "--link: expected a rate"),
        (lambda: Laboratory(2, cpus=0), "--cpus: expected a number of cores"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Laboratory], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
