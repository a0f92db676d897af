"""What `medusa cluster start` accepts, and how it names what it does not."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_nodes import MEDUSA, environment
from medusa_adapters.cli.cluster.connection import ask
from medusa_cluster.node.ray.processes import ray_command, ray_environment
from medusa_cluster.node.settings import NodeServerSettings, check_folder, check_name, make_token
from medusa_runtime.errors import ConfigError
from medusa_runtime.storage.peer_access import read_token
from strangers import MALLORY, as_user

from benchmarks.ports import free_port


def test_a_folder_is_ours_alone(tmp_path: Path) -> None:
    (folder := Path(f"/tmp/ct{os.getpid()}")).mkdir(mode=0o700)
    try:
        assert check_folder(folder) == folder
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match="nobody else can write"):
            check_folder(folder)
    finally:
        folder.rmdir()
    with pytest.raises(ConfigError, match="at most 34 bytes"):
        check_folder(Path("/tmp") / ("x" * 40))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        check_folder(Path("/proc/nothing"))


@pytest.mark.root
@pytest.mark.forked
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
@pytest.mark.parametrize("by", ["folder", "link"])
def test_a_command_asks_no_socket_in_a_folder_that_another_user_has_made(tmp_path: Path, by: str) -> None:
    user = 54321
    folder = Path(f"/tmp/medusa-cluster-{user}")
    (mine := Path(tempfile.mkdtemp(dir="/tmp"))).chmod(0o755)
    asked: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(mine / "control.sock"))
        (mine / "control.sock").chmod(0o777)
        server.listen()

        def answer() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                asked.append(connection.recv(1 << 16))
                connection.sendall(b'{"ok": {}}\n')
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        os.chown(mine, MALLORY, MALLORY)
        try:
            if by == "folder":
                mine.rename(folder)
            else:
                folder.symlink_to(mine)
                os.chown(folder, MALLORY, MALLORY, follow_symlinks=False)
            arguments = argparse.Namespace(address=None, dir=None)
            said = as_user(user, lambda: ask(arguments, "deploy", {"secret": "of this user"}))
        finally:
            folder.unlink() if folder.is_symlink() else None
            for path in (folder, mine):
                shutil.rmtree(path, ignore_errors=True)
            server.shutdown(socket.SHUT_RDWR)
    assert "expected a folder of our own" in said
    assert not asked


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "x" * 64])
def test_a_name_fits_into_a_label(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        check_name(name)


def test_a_new_token_can_be_read_by_its_user_alone(tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    assert len(read_token(str(tmp_path / "token"))) == 64
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_ray_gets_pinned_ports_and_none_of_our_environment(tmp_path: Path) -> None:
    settings = NodeServerSettings("n1", tmp_path, "10.0.0.2", tmp_path / "token", head_url="http://10.0.0.1:8114")
    command = ray_command(settings, "10.0.0.1:6379")
    ports = [
        word.partition("=")[2] for word in command if "-port=" in word and word[:2] == "--" and "label" not in word
    ]
    assert "--labels=medusa-node=n1,medusa-port=8114" in command
    assert ports == ["6380", "6381", "6382", "6383", "6384", "6385", "6389", "6418"]
    found = ray_environment(settings, {"MEDUSA_TOKEN": "x", "RAY_ADDRESS": "y", "PATH": "/bin"})
    assert "MEDUSA_TOKEN" not in found
    assert "RAY_ADDRESS" not in found
    assert "RAY_gcs_storage" not in found  # the head's alone
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["PATH"] == "/bin"
    files, file_bytes = 1 + int(found["RAY_ROTATION_BACKUP_COUNT"]), int(found["RAY_ROTATION_MAX_BYTES"])
    assert files * file_bytes < 10 << 20, "they are in a folder that is memory on most machines"
    machine = {"RAY_CLOUD_INSTANCE_ID": "i-1", "RAY_NODE_TYPE_NAME": "worker"}  # by which autoscalers know it
    assert machine.items() <= ray_environment(settings, machine).items()


def test_the_controller_learns_how_many_nodes_stay_where_there_is_an_autoscaler(tmp_path: Path) -> None:
    head = NodeServerSettings("n1", tmp_path, "10.0.0.1", tmp_path / "token", least_nodes=3)
    assert ray_environment(head, {})["MEDUSA_CLUSTER_LEAST_NODES"] == "3"
    assert "MEDUSA_CLUSTER_LEAST_NODES" not in ray_environment(replace(head, least_nodes=None), {})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "one of the arguments --head --address is required"),
        (["--head", "--host", "127.0.0.1"], "--host: expected an address that other nodes reach, found 127.0.0.1"),
        (["--head", "--data-port", "0"], "--data-port: expected a port from 1 to 65535"),
        (["--head", "--ray-port", "65500"], "--ray-port: expected a port from 1 to 65496"),
        (["--address", "host:port"], "--address: expected HOST or HOST:PORT"),
        (["--address", "host:²"], "--address: expected HOST or HOST:PORT"),
        (["--head", "--link", "fast"], "--link: expected a rate such as 400mbit"),
        (["--head", "--device-link", "fast"], "--device-link: expected a rate such as 400mbit"),
        (["--head", "--tls-cert", "/nothing"], "--tls-cert, --tls-key and --tls-ca together"),
        (
            ["--address", "h", "--autoscaling-config", "/etc/hosts"],
            "--autoscaling-config: expected it with --head alone",
        ),
        (["--head", "--least-nodes", "3"], "--least-nodes: expected it with --autoscaling-config"),
        (["--head", "--external-autoscaler", "--least-nodes", "0"], "--least-nodes: expected 1 or more, found 0"),
    ],
)
def test_a_bad_flag_is_named(flags: list[str], said: str) -> None:
    folder = f"/tmp/ct{os.getpid()}f"
    command = [MEDUSA, "cluster", "start", "--dir", folder, "--host", "127.0.0.2", *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    try:
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        if os.path.isdir(folder):
            os.rmdir(folder)


def test_without_the_extra_one_line_says_what_to_install() -> None:
    folder = Path(f"/tmp/ct{os.getpid()}n")
    code = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "ray" else found(name, *rest)
from medusa_adapters.cli.main import main
sys.exit(main(["cluster", "start", "--head", "--dir", sys.argv[1]]))
"""
    command = [sys.executable, "-c", code, folder]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert not folder.exists()
    assert done.returncode == 2
    assert done.stderr == (
        'medusa: medusa cluster needs ray: pip install "medusa-runtime[cluster]" [Config.MissingPackage]\n'
    )


def test_importing_the_package_imports_no_ray() -> None:
    code = """
import sys
import medusa_cluster.node.server, medusa_cluster.node.ray.actor, medusa_cluster.controller.actor
import medusa_cluster.controller.launch, medusa_adapters.cli.cluster.command, medusa_adapters.cli.cluster.start
assert "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_head_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = Path(f"/tmp/ct{os.getpid()}h")
    folder.mkdir(mode=0o700)
    try:
        make_token(folder / "token")
        command = [MEDUSA, "cluster", "start", "--address", "127.0.0.1:9", "--dir", folder, "--host", "127.0.0.2"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        assert "the head's node server at http://127.0.0.1:9 cannot be reached" in done.stderr
        assert not (folder / "control.sock").exists()
    finally:
        import shutil

        shutil.rmtree(folder)


def test_a_head_whose_ports_for_ray_are_in_use_is_not_started() -> None:
    pytest.importorskip("ray")
    folder = Path(f"/tmp/ct{os.getpid()}p")
    folder.mkdir(mode=0o700)
    try:
        with socket.create_server(("127.0.0.2", 0)) as taken:
            port = taken.getsockname()[1]
            command = [MEDUSA, "cluster", "start", "--head", "--dir", folder, "--host", "127.0.0.2", "--data-port"]
            command += [str(free_port()), "--ray-port", str(port - 1)]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
        assert done.returncode == 2
        assert f"--ray-port: expected 40 free ports from {port - 1} on, found 127.0.0.2:{port} in use" in done.stderr
        assert not list((folder / "logs").glob("ray*"))
    finally:
        shutil.rmtree(folder)
