"""Whose code a start runs: what the operator named, what was signed, and its own user's files. Nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.config import Settings, from_env
from medusa_runtime.errors import ConfigError, StateError
from medusa_runtime.state.bundle.locate import FOLDER
from medusa_runtime.state.bundle.manifest import Artifact, Manifest
from medusa_runtime.state.bundle.own_mark import is_own, make_mark
from medusa_runtime.state.bundle.reader import Bundle
from medusa_runtime.state.bundle.signing import Signer
from medusa_runtime.state.bundle.writer import BundleWriter
from medusa_runtime.state.kinds import KV_PLAN
from medusa_runtime.state.trust import Trust
from medusa_runtime.storage.local import LocalStore
from medusa_vllm import COMPILE_CACHE

ARTIFACTS = (Artifact(COMPILE_CACHE.name, {"isa": "x"}, "0" * 64, 4, b"code"), Artifact(KV_PLAN.name, {}, "1" * 64, 2))


def objection(trust: Trust, url: str, manifest: Manifest = Manifest(ARTIFACTS)) -> str | None:  # noqa: B008
    return trust.objection(url, f"{FOLDER}/", Manifest.parse(manifest.to_json()))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private key and its public one, by the command that the error message names."""
    folder = tmp_path_factory.mktemp("keys")
    private, public = folder / "key.pem", folder / "key.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return private, public


@pytest.mark.parametrize(
    ("prefix", "url", "trusted"),
    [
        ("s3://bucket/team", "s3://bucket/team/m", True),
        ("s3://bucket/team/", "s3://bucket/team/m/", True),
        ("s3://bucket/team/m", "s3://bucket/team/m", True),
        ("s3://bucket", "s3://bucket/m", True),
        ("s3://bucket/team", "s3://bucket/team-b/m", False),
        ("s3://bucket/team", "s3://bucket/m", False),
        ("s3://bucket/team", "s3://bucket/team/../m", False),
        ("s3://bucket/team", "s3://bucket/team/%2e%2e/m", False),
        ("s3://bucket", "s3://bucket-b/m", False),
        ("s3://bucket", "https://bucket/m", False),
        ("https://host/m", "https://HOST:443/m?signature=1", True),
        ("https://host/m", "https://user:password@host/m", True),
        ("https://host/m", "https://host:8443/m", False),
        ("https://host/m", "http://host/m", False),
        ("https://host/m", "https://host@elsewhere/m", False),
        ("https://host/m", "https://host\\@elsewhere/m", False),
        ("https://host/m", "https://elsewhere/https://host/m", False),
        ("https://host/m", "https://[host/m", False),
        ("abfs://models@account", "abfs://models@account/m", True),
        ("abfs://models@account", "abfs://theirs@account/m", False),
        ("s3://bucket/team", "simplecache::s3://bucket/team/m", False),
        ("/models", "s3:///models/m", False),
    ],
)
def test_a_prefix_is_a_folder_of_one_host(prefix: str, url: str, trusted: bool) -> None:
    assert from_env({}, trust_state=prefix).trust_state == prefix
    assert (objection(Trust.parse(prefix, None), url) is None) == trusted


def test_an_objection_says_why_and_how_to_allow() -> None:
    said = objection(Trust(), "https://user:secret@host/m?token=secret")
    assert said is not None
    assert "it is not signed" in said
    assert "--trust-state=https://host/m," in said
    assert "secret" not in said


@pytest.mark.parametrize(
    "text",
    ["yes", "*", "models/", "s3://", "://host", "s3://b/../c", "https://user@host/m", "a::s3://b/c", ",", "/a?b"],
)
def test_a_prefix_that_names_no_place_fails_at_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"MEDUSA_TRUST_STATE=.*expected absolute folders and URL prefixes"):
        from_env({"MEDUSA_TRUST_STATE": text})


def test_a_key_is_a_file_or_its_text(keys: tuple[Path, Path]) -> None:
    public = Signer.read(keys[0]).public
    assert from_env({"MEDUSA_TRUST_KEY": str(keys[1])}).trust_key == public
    assert from_env({}, trust_key=f"{public}, {keys[1]}").trust_key == f"{public},{public}"


@pytest.mark.parametrize("text", ["ed25519:AAAA", "ed25519:?", "/no/such/file", "{private}", "/bin/true", "/", ","])
def test_what_is_no_public_key_fails_at_start(text: str, keys: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"--trust-key=.*expected ed25519:<base64 of 32 bytes>"):
        from_env({}, trust_key=text.format(private=keys[0]))


@pytest.mark.parametrize("text", ["-----BEGIN PUBLIC KEY", "BEGIN PUBLIC KEY-----", "-----BEGIN PUBLIC KEY-----"])
def test_a_key_file_that_was_cut_fails_at_start(text: str, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text(text)
    with pytest.raises(ConfigError, match=r"--trust-key=.*expected ed25519:<base64 of 32 bytes>"):
        from_env({}, trust_key=str(tmp_path / "key.pem"))


def test_a_signature_is_good_for_its_manifest_and_its_key(keys: tuple[Path, Path], tmp_path: Path) -> None:
    signer = Signer.read(keys[0])
    other = tmp_path / "other.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", other], check=True)
    text = Manifest(ARTIFACTS, ("config.json",)).to_json(signer)
    manifest = Manifest.parse(text)

    def said(trust: Trust, text: bytes = text) -> str | None:
        return trust.objection("https://anywhere/m", f"{FOLDER}/", Manifest.parse(text))

    assert manifest.artifacts == ARTIFACTS
    assert said(Trust(keys=(signer.public,))) is None
    assert "not in --trust-key" in str(said(Trust(keys=(Signer.read(other).public,))))
    assert "not in --trust-key" in str(said(Trust()))
    again = json.dumps(json.loads(text), indent=7, sort_keys=True).encode()
    assert said(Trust(keys=(signer.public,)), again) is None  # another spelling of the same


def _changes() -> dict[str, Callable[[dict[str, Any]], Any]]:
    return {
        "digest": lambda document: document["artifacts"][0].update(sha256="f" * 64),
        "key": lambda document: document["artifacts"][0]["key"].update(isa="y"),
        "kind": lambda document: document["artifacts"][1].update(kind="compile-cache"),
        "added": lambda document: document["artifacts"].append(document["artifacts"][0]),
        "removed": lambda document: document["artifacts"].pop(),
        "swapped": lambda document: document["artifacts"].reverse(),
        "files": lambda document: document.update(files=[]),
        "field": lambda document: document.update(more=1),
        "signature": lambda document: document["signature"].update(value="AAAA"),
    }


@pytest.mark.parametrize("change", _changes())
def test_a_change_of_a_signed_manifest_is_noticed(change: str, keys: tuple[Path, Path]) -> None:
    signer = Signer.read(keys[0])
    document = json.loads(Manifest(ARTIFACTS, ("config.json",)).to_json(signer))
    _changes()[change](document)
    text = json.dumps(document).encode()
    found = Trust(keys=(signer.public,)).objection("https://anywhere/m", f"{FOLDER}/", Manifest.parse(text))
    assert "its signature is wrong" in str(found)


def test_another_message_of_the_same_key_is_no_signature(keys: tuple[Path, Path]) -> None:
    """A key that signs other things, too, must not be made to sign a bundle unawares."""
    signer = Signer.read(keys[0])
    document = json.loads(Manifest(ARTIFACTS).to_json())
    import base64

    bare = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    document["signature"] = {"key": signer.public, "value": base64.b64encode(signer.sign(bare)).decode()}
    text = json.dumps(document).encode()
    assert Trust(keys=(signer.public,)).signature_objection(Manifest.parse(text)) is not None


def test_starts_without_a_signature_do_not_import_cryptography(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / FOLDER) as writer:
        writer.commit(Manifest(ARTIFACTS))
    script = """
import sys
from medusa_runtime.state.trust import Trust
from medusa_runtime.storage.local import LocalStore
from medusa_runtime.state.bundle.locate import read_manifest
from medusa_runtime.state.bundle.manifest import Manifest
from medusa_runtime.storage.base import open_store
store = open_store(sys.argv[1])
text = read_manifest(store, ".medusa/")
assert Trust().objection(store.url, ".medusa/", Manifest.parse(text)) is None
assert "not signed" in Trust(own_bundles=False).objection(store.url, ".medusa/", Manifest.parse(text))
assert not any(name.startswith("cryptography") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def local(folder: Path, trust: Trust = Trust()) -> str | None:  # noqa: B008
    with closing(Bundle(LocalStore(str(folder)), f"{FOLDER}/")) as bundle:
        manifest = bundle.manifest()
        assert manifest is not None
        return bundle.objection(trust, manifest)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with BundleWriter(tmp_path / "m" / FOLDER) as writer:
        writer.commit(Manifest(ARTIFACTS))
    return tmp_path / "m"


def key_file() -> Path:
    return Path(os.environ["XDG_STATE_HOME"], "medusa", "bundle.key")


def test_what_this_user_has_materialized_is_trusted_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    assert local(folder) is None
    assert local(folder.rename(tmp_path / "elsewhere")) is None
    assert "not signed" in str(local(tmp_path / "elsewhere", Trust(own_bundles=False)))  # the node agent's
    assert local(tmp_path / "elsewhere", Trust((str(tmp_path),), own_bundles=False)) is None
    assert oct(key_file().stat().st_mode)[-3:] == "600"


def test_a_link_that_is_exchanged_lends_no_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns a folder in the path turns it to a trusted place once the manifest has been read."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    digests = {}
    for name in ("trusted", "evil"):
        with BundleWriter(tmp_path / name / FOLDER) as writer:
            artifact = writer.add(COMPILE_CACHE.name, {}, name.encode() * 100_000)
            writer.commit(Manifest((artifact._replace(inline=None),)))
        digests[name] = artifact.sha256
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state of another"))
    link, trust = tmp_path / "link", Trust((str(tmp_path / "trusted"),))
    for first, second, allowed in (("trusted", "evil", True), ("evil", "trusted", False)):
        link.symlink_to(tmp_path / first)
        with closing(Bundle(LocalStore(str(link)), f"{FOLDER}/")) as bundle:
            link.unlink()
            link.symlink_to(tmp_path / second)
            manifest = bundle.manifest()
            assert manifest is not None
            assert manifest.artifacts[0].sha256 == digests[first]
            assert (bundle.objection(trust, manifest) is None) == allowed
            assert bundle.read(manifest.artifacts[0]).startswith(first.encode())
        link.unlink()


def test_a_folder_that_is_made_a_link_lends_no_trust(tmp_path: Path) -> None:
    for name in ("trusted", "mine/m"):
        with BundleWriter(tmp_path / name / FOLDER) as writer:
            writer.commit(Manifest(ARTIFACTS[1:]))
    with closing(Bundle(LocalStore(str(tmp_path / "mine" / "m")), f"{FOLDER}/")) as bundle:
        (tmp_path / "mine").rename(tmp_path / "moved")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "m").symlink_to(tmp_path / "trusted")
        assert bundle.objection(Trust((str(tmp_path / "trusted"),)), Manifest(ARTIFACTS)) is not None


def test_a_bundle_that_appears_after_it_was_looked_for_is_not_trusted_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with closing(Bundle(LocalStore(str(tmp_path / "m")), f"{FOLDER}/")) as bundle:
        (tmp_path / "m" / FOLDER).mkdir()
        (tmp_path / "m" / FOLDER / "manifest.json").write_bytes(Manifest(ARTIFACTS).to_json())
        assert bundle.objection(Trust((str(tmp_path),)), Manifest(ARTIFACTS)) is not None


def test_a_user_without_a_home_has_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder may be an unpacked archive, with a key in it."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StateError, match="no home folder"):
        make_mark(b"message")
    assert not is_own("mark", b"message")
    assert not list(tmp_path.iterdir())


def test_a_downloaded_bundle_is_nobodys_own(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files belong to the user who has downloaded, cloned or unpacked the checkpoint."""
    archive = tmp_path / "checkpoint.tar"
    subprocess.run(["tar", "-C", folder, "-cf", archive, "."], check=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    mine = tmp_path / "mine"
    mine.mkdir()
    subprocess.run(["tar", "-C", mine, "-xf", archive], check=True)
    manifest = mine / FOLDER / "manifest.json"
    assert manifest.stat().st_uid == os.geteuid()
    assert "this user has not materialized it on this machine; it is not signed" in str(local(mine))
    with BundleWriter(tmp_path / "other" / FOLDER) as writer:
        writer.commit(Manifest(ARTIFACTS))  # makes this user's key
    assert "has not materialized it" in str(local(mine))
    document = json.loads(manifest.read_bytes())
    for mark in (
        "",
        "0" * 64,
        None,
        5,
        "\u00e9",
        json.loads((tmp_path / "other" / FOLDER / manifest.name).read_text()),
    ):
        manifest.write_text(json.dumps(document | {"mark": mark}))
        assert "has not materialized it" in str(local(mine))


@pytest.mark.parametrize("change", [change for change in _changes() if change != "signature"])
def test_a_change_of_an_own_manifest_is_noticed(change: str, folder: Path) -> None:
    path = folder / FOLDER / "manifest.json"
    document = json.loads(path.read_bytes())
    document.setdefault("files", ["config.json"])
    _changes()[change](document)
    path.write_text(json.dumps(document))
    assert "has not materialized it" in str(local(folder))


def test_data_alone_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with BundleWriter(tmp_path / FOLDER) as writer:
        writer.commit(Manifest(ARTIFACTS[1:]))
    assert not key_file().exists()


@pytest.mark.parametrize("kind", ["readable", "short", "link", "folder", "unwritable"])
def test_a_key_that_others_may_know_is_none(
    kind: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_file()
    if kind == "readable":
        key.chmod(0o644)
    elif kind == "short":
        key.write_bytes(b"short")
    else:
        key.rename(tmp_path / "key")
        if kind == "link":
            key.symlink_to(tmp_path / "key")
        elif kind == "folder":
            key.mkdir()
        else:
            key.parent.rmdir()
            key.parent.write_text("a file")
    assert "has not materialized it" in str(local(folder))
    with BundleWriter(folder / FOLDER) as writer:
        writer.commit(Manifest(ARTIFACTS))
    assert "only with --trust-state" in caplog.text
    assert "has not materialized it" in str(local(folder))


@pytest.mark.root
def test_the_key_of_another_user_is_not_used(folder: Path) -> None:
    os.chown(key_file(), 1000, 1000)
    assert "has not materialized it" in str(local(folder))


def test_links_lead_where_they_lead(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    trusted = tmp_path_factory.mktemp("trusted")
    (trusted / "model").symlink_to(folder)
    assert local(trusted / "model", Trust((str(trusted),), own_bundles=False)) is not None
    assert local(trusted / "model", Trust((str(folder),), own_bundles=False)) is None


@pytest.mark.parametrize("content", [b"", b"not PEM", None])
def test_a_file_that_is_no_private_key_is_refused_before_any_work(content: bytes | None, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    if content is not None:
        key.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--sign=.*openssl genpkey -algorithm ed25519 -out key\.pem"):
        Signer.read(key)


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    command = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(key)]
    subprocess.run(command, check=True)
    with pytest.raises(ConfigError, match="found another kind of key"):
        Signer.read(key)


def test_the_settings_of_a_function_do_not_reach_an_agents_engine() -> None:
    from medusa_runtime.errors import NodeError
    from medusa_runtime.node.engines.handover import settings_from_body, settings_to_body

    body = settings_to_body(Settings(model="m", trust_state="/", trust_key="ed25519:x"))
    assert not any("trust" in name for name in body)
    with pytest.raises(NodeError, match="trust_state"):
        settings_from_body({**body, "trust_state": "/"})


def test_code_of_a_shared_region_is_nobodys() -> None:
    """Whoever shares the machine may have brought the agent that region (`keep`)."""
    from medusa_runtime.checkpoint.index import WeightIndex
    from medusa_runtime.region.reader import Region
    from medusa_runtime.state.kinds import file_name
    from medusa_runtime.timeline import Timeline
    from medusa_vllm.compiled.settings import CompiledStart

    region = Region.create()
    writer = region.writer()
    writer.lay_out(WeightIndex([], {}), {file_name(COMPILE_CACHE.name): b"forged", "config.json": b"{}"})
    writer.finish()
    writer.close()
    for shared, wanted in ((False, True), (True, False)):
        reader = Region(os.dup(region.fd), from_agent=shared)
        assert reader.file("config.json") == b"{}"
        assert reader.has_code(file_name(COMPILE_CACHE.name)) is wanted
        assert (reader.code(file_name(COMPILE_CACHE.name)) is not None) is wanted
        assert CompiledStart(reader, Settings(engine="vllm"), Timeline.create("engine")).wanted is wanted
        reader.attach_file(file_name(COMPILE_CACHE.name), b"lent")
        assert reader.code(file_name(COMPILE_CACHE.name)) == b"lent"
        reader.close()
    region.close()
