"""A cluster with certificates: Ray, node servers and commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cluster_nodes import MEDUSA, MODEL, ClusterNode, environment
from waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, to make certificates"),
]


def _certificates(folder: Path) -> list[str]:
    """The flags that name a cluster's CA, and a certificate for 127.0.0.2 with its key."""

    def openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, cwd=folder)

    new = ("-newkey", "rsa:2048", "-nodes", "-subj")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.2")
    openssl("req", "-x509", *new, "/CN=cluster", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *new, "/CN=node", "-keyout", "node.key", "-out", "node.csr")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "node.csr", *signed, "-out", "node.pem")
    return [
        f"--tls-{name}={folder / file}" for name, file in (("cert", "node.pem"), ("key", "node.key"), ("ca", "ca.pem"))
    ]


def test_a_node_with_certificates_serves_those_who_have_one(tmp_path: Path) -> None:
    flags = _certificates(tmp_path)
    node = ClusterNode("head", 0, flags=flags)
    try:
        node.wait_ready()
        assert f"https://{node.address}" in node.output()
        command = [MEDUSA, "cluster", "status", "--address", node.address, "--token-file", node.token_file]
        asked = subprocess.run([*command, *flags], env=environment(), capture_output=True, text=True, timeout=240)
        assert "1 node\n" in asked.stdout, asked.stderr
        refused = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
        assert refused.returncode == 1
        assert refused.stderr.count("\n") == 1
        assert node.medusa("deploy", "tiny", "--model", str(MODEL), "--min", "1").returncode == 0
        until(lambda: "tiny: 1 of 1 to 1 instances" in node.medusa("status").stdout, node.output)
        assert node.end() == 0
    finally:
        node.close()
