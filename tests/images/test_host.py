"""What a machine lends to a build of an image: its package mirrors, and never what the base could not use."""

from __future__ import annotations

import configparser
import os
import runpy
import subprocess
import sys
import zipfile
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


PIP_CONF = """
[global]
index-url = https://packages.example/simple
extra-index-url =
    https://more.example/simple
    {root}/index/simple
trusted-host = packages.example
find-links = {root}/overridden
cert = {root}/ca.pem
client-cert = {root}/client.pem
constraint = {root}/constraints.txt
require-virtualenv = true
target = {root}/target
user = true
cache-dir = {root}/cache
[install]
find-links = file://{root}/wheels
no-build-isolation = true
[download]
index-url = https://other.example/simple
"""


@pytest.fixture
def pip_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's pip configuration, in a file that this machine's pip reads, and the files that it names."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    root = tmp_path / "machine"
    for folder in ("index/simple", "wheels", "nested"):
        (root / folder).mkdir(parents=True)
    (root / "ca.pem").write_text("certificates")
    (root / "constraints.txt").write_text("# ours\niniconfig==2.0.0\n-c nested/more.txt\n")
    (root / "nested/more.txt").write_text("flask<4\n--constraint=../constraints.txt\n-c https://e.example/c.txt\n")
    (root / "pip.conf").write_text(PIP_CONF.format(root=root))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(root / "pip.conf"))
    return root


def lent(host: dict[str, Any], scratch: Path) -> tuple[dict[str, str], dict[str, str]]:
    """pip's settings as a build has them, and the folders by their place there."""
    scratch.mkdir()
    files, folders = host["lend"](scratch)
    parser = configparser.RawConfigParser()
    parser.read(files["pip"])
    return dict(parser["global"]), {place: source for source, place in folders.items()}


def test_pip_s_sources_are_lent_and_nothing_else(host: dict[str, Any], pip_root: Path, tmp_path: Path) -> None:
    settings, folders = lent(host, tmp_path / "scratch")
    assert settings == {
        "index-url": "https://packages.example/simple",
        "extra-index-url": "https://more.example/simple /dev/lent/1/simple",
        "trusted-host": "packages.example",
        "find-links": "file:///dev/lent/0",
        "cert": "/dev/lent/pip/cert.pem",
        "constraint": "/dev/lent/pip/constraint-1.txt",
    }
    assert folders["/dev/lent/0"] == str(pip_root / "wheels")
    assert folders["/dev/lent/1"] == str(pip_root / "index")
    made = Path(folders["/dev/lent/pip"])
    assert (made / "cert.pem").read_text() == "certificates"
    constraints = (made / "constraint-1.txt").read_text().splitlines()
    assert constraints == ["# ours", "iniconfig==2.0.0", "flask<4", "-c https://e.example/c.txt"]
    assert str(pip_root) not in (tmp_path / "scratch/pip.conf").read_text()


def test_the_environment_stands_above_the_files(
    host: dict[str, Any], pip_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.txt").write_text("flask<3\n")
    (tmp_path / "certs").mkdir()
    for name in ("a.pem", "b.pem"):
        (tmp_path / "certs" / name).write_text(name)
    monkeypatch.setenv("PIP_CONSTRAINT", f"{tmp_path}/other.txt https://e.example/c.txt")
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "certs"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    settings, folders = lent(host, tmp_path / "scratch")
    assert settings["constraint"] == "/dev/lent/pip/constraint-1.txt https://e.example/c.txt"
    assert settings["no-index"] == "1"
    assert "require-virtualenv" not in settings
    assert (Path(folders["/dev/lent/pip"]) / "constraint-1.txt").read_text() == "flask<3\n"
    assert (Path(folders["/dev/lent/pip"]) / "cert.pem").read_text() == "a.pem\nb.pem"


@pytest.mark.parametrize(("key", "file"), [("constraint", "constraints.txt"), ("cert", "ca.pem")])
def test_a_file_that_is_not_there_is_one_error(
    host: dict[str, Any], pip_root: Path, tmp_path: Path, key: str, file: str
) -> None:
    (pip_root / file).unlink()
    with pytest.raises(
        SystemExit, match=f"pip's setting {key} names .*{file}, which cannot be read .*pip config debug"
    ):
        host["lend"](tmp_path)


def test_pip_installs_with_what_is_lent(host: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, in another environment, under the constraint and from the folder of wheels alone."""
    wheels, places = tmp_path / "wheels", tmp_path / "build"
    wheels.mkdir()
    for version in ("1.0", "2.0"):
        make_wheel(wheels, version)
    (tmp_path / "constraints.txt").write_text("lentpackage<2\n")
    conf = "[global]\nno-index = true\nfind-links = {0}/wheels\nconstraint = {0}/constraints.txt\n"
    conf += "require-virtualenv = true\nuser = true\ntarget = {0}/target\nclient-cert = {0}/none.pem\n"
    (tmp_path / "pip.conf").write_text(conf.format(tmp_path))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    _, folders = lent(host, tmp_path / "scratch")
    written = (tmp_path / "scratch/pip.conf").read_text()
    for place, source in folders.items():  # where a build mounts them
        written = written.replace(place, source)
    (tmp_path / "build.conf").write_text(written)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", places], check=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "build.conf")}
    pip = [sys.executable, "-m", "pip", "--python", places / "bin/python"]
    ran = subprocess.run([*pip, "install", "lentpackage"], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert list(places.glob("lib/*/site-packages/lentpackage-1.0.dist-info"))
    assert not (tmp_path / "target").exists()


def make_wheel(folder: Path, version: str) -> None:
    """A package without modules."""
    info = f"lentpackage-{version}.dist-info"
    with zipfile.ZipFile(folder / f"lentpackage-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: lentpackage\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
