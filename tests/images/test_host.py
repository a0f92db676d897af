"""What a machine lends to a build of an image: its package mirrors, and never what the base could not use."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

HOST = Path(__file__).parents[2] / "images" / "host.py"
STANZA = "Types: deb\nURIs: {uri}\nSuites: {suite} {suite}-updates\nComponents: main\n{keys}"
DEBIAN_KEYS = "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"


@pytest.fixture
def host() -> dict[str, Any]:
    return runpy.run_path(str(HOST))


def sources(root: Path, *stanzas: str) -> Path:
    (root / "sources.list.d").mkdir(exist_ok=True)
    (root / "sources.list.d" / "debian.sources").write_text("# ours\n" + "\n\n".join(stanzas))
    return root


def test_mirrors_of_the_base_s_release_are_lent(host: dict[str, Any], tmp_path: Path) -> None:
    mirror = STANZA.format(uri="http://mirror.example/debian", suite="bookworm", keys=DEBIAN_KEYS)
    unsigned = STANZA.format(uri="http://mirror.example/security", suite="bookworm", keys="")
    found = host["apt_mirrors"](sources(tmp_path, mirror, "# a comment\n" + unsigned))
    assert found == [mirror.strip(), unsigned.strip()]


@pytest.mark.parametrize(
    "stanza",
    [
        STANZA.format(uri="http://deb.debian.org/debian", suite="bookworm", keys=DEBIAN_KEYS),
        STANZA.format(uri="http://mirror.example/debian", suite="trixie", keys=DEBIAN_KEYS),
        STANZA.format(uri="https://node.example/x", suite="bookworm", keys="Signed-By: /usr/share/keyrings/node.gpg\n"),
        "",
    ],
    ids=["public", "another release", "another's keys", "empty"],
)
def test_what_the_base_has_or_cannot_use_is_not(host: dict[str, Any], tmp_path: Path, stanza: str) -> None:
    assert host["apt_mirrors"](sources(tmp_path, stanza)) == []


def test_what_is_lent_has_a_place_in_the_build(host: dict[str, Any]) -> None:
    dockerfile = (HOST.parent.parent / "Dockerfile").read_text()
    for name, target in host["INSIDE"].items():
        assert f"--mount=type=secret,id={name},target={target}" in dockerfile
