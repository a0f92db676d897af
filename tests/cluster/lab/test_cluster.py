"""A cluster in a laboratory: the commands of the page about it, and that nothing of it is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import Laboratory
from medusa_runtime.errors import UnauthorizedError, UnknownNameError
from process_tree import alive, descendants
from waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
]

MEDUSA = Path(sys.executable).with_name("medusa")
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
REQUEST = {"model": "pydoc-lm", "prompt": "This function returns", "max_tokens": 12, "temperature": 0}
ANSWER = " the value of the value."


def completion(url: str) -> str:
    body = json.dumps(REQUEST).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_the_laboratory_of_the_page_serves_and_is_gone_after_kill_9() -> None:
    command = [MEDUSA, "cluster", "lab", "--nodes", "2", "--link", "400mbit", "--model", EXAMPLE]
    command += ["--gateway-port", "18099", "--prewarm", "torch=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            said = ""
            while "Ctrl-C ends it" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            assert "gateway: http://127.0.0.1:18099 (for nodes http://10.77.0.254:18099)" in said
            assert completion("http://127.0.0.1:18099") == ANSWER
            started = descendants(process.pid)
            assert {"gcs_server", "raylet"} <= set(started.values())
        finally:
            process.kill()
            process.wait()
    until(lambda: not any(alive(pid) for pid in started))


def test_the_commands_of_the_page() -> None:
    with Laboratory(2, "400mbit", origin={"pydoc-lm": EXAMPLE}) as lab:
        cluster = LabCluster(lab, ["--prewarm", "torch=0"])
        cluster.start()  # medusa cluster start --head, and --address HEAD --token-file FILE
        folder = ["--dir", lab.node_folder("n2")]

        def medusa(*arguments: str | Path, node: str = "n2") -> subprocess.CompletedProcess[str]:
            return lab.run(node, [MEDUSA, "cluster", *arguments], capture_output=True, text=True)

        url = f"{lab.origin_url}/pydoc-lm"
        assert medusa("deploy", "pydoc-lm", "--model", url, "--min", "0", "--max", "2", *folder).returncode == 0
        shown = medusa("status", *folder).stdout
        assert all(word in shown for word in ("n1", "n2", "pydoc-lm"))
        cluster.start_gateway(8080)
        assert completion(lab.forward(0, "switch", 8080)) == ANSWER
        assert medusa("scale", "pydoc-lm", "--max", "1", *folder).returncode == 0
        elsewhere = ["--address", "n1", "--token-file", cluster.token_file]
        assert json.loads(medusa("status", "--json", *elsewhere).stdout)["models"][0]["max"] == 1
        assert medusa("drain", "n2", *folder).returncode == 0
        assert medusa("remove", "pydoc-lm", *folder).returncode == 0
        with pytest.raises(UnknownNameError, match="pydoc-lm"):
            cluster.call("scale", name="pydoc-lm", min=1, max=1)
        cluster.stop()
        assert [server.returncode for server in cluster.servers.values()] == [0, 0]
        assert [gateway.returncode for gateway in cluster.gateways] == [0]
        until(lambda: not (lab.processes("n1") | lab.processes("n2")))


def test_a_node_with_another_token_is_refused_in_one_line() -> None:
    with Laboratory(2) as lab:
        cluster = LabCluster(lab, ["--prewarm", "torch=0"])
        cluster.start_node("n1")
        cluster.wait_ready("n1")
        wrong = lab.node_folder("n2") / "wrong"
        wrong.touch(0o600)
        wrong.write_text("x" * 64)
        command = [MEDUSA, "cluster", "start", "--address", "n1", "--dir", lab.node_folder("n2"), "--token-file", wrong]
        refused = lab.run("n2", command, capture_output=True, text=True, timeout=240)
        assert refused.returncode in (1, 2)
        (line,) = [line for line in refused.stderr.splitlines() if line.startswith("medusa: ")]
        assert "token" in line
        cluster.token = "y" * 64
        with pytest.raises(UnauthorizedError):
            cluster.status()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_laboratory_ends_in_order(number: signal.Signals) -> None:
    command = [MEDUSA, "cluster", "lab", "--nodes", "1", "--prewarm", "torch=0", "--gateway-port", "18098"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while "Ctrl-C ends it" not in process.stderr.readline():
            assert process.poll() is None
        started = descendants(process.pid)
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else 128 + number)
    assert not any(alive(pid) for pid in started)
