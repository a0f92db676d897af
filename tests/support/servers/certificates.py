"""Certificates of a cluster, for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificates(folder: Path, days: int = 2) -> tuple[Path, Path, Path]:
    """A cluster's CA, and a node's certificate, valid for so many days, and key. Needs openssl."""
    ca, ca_key, cert, key, request = (
        folder / name for name in ("ca.pem", "ca.key", "node.pem", "node.key", "node.csr")
    )

    def openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj")  # made at once
    openssl("req", "-x509", *new, "/CN=cluster", "-days", "2", "-keyout", ca_key, "-out", ca)
    openssl("req", *new, "/CN=node", "-keyout", key, "-out", request)
    signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial")
    valid = ["-days", str(days)]
    known = subprocess.run(["openssl", "x509", "-help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if days < 0 and "-not_after" in known.stdout:  # newer versions take no days below 0
        valid = ["-not_before", "20200101000000Z", "-not_after", "20200102000000Z"]
    openssl("x509", "-req", "-in", request, *signed, *valid, "-out", cert)
    return ca, cert, key
