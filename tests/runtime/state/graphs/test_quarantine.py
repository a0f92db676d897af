"""Which graphs that broke a context are remembered, and for how long."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.state.graphs import Blueprints
from medusa_runtime.state.graphs.blob_format import digest_of, encode_blueprints
from medusa_runtime.state.graphs.restoration import quarantine as quarantine
from medusa_runtime.state.graphs.restoration.quarantine import FILE, Quarantine

DIGEST, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(quarantine, "driver_version", lambda: "580.10")
    return {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "model/.medusa").mkdir(parents=True)
    return tmp_path / "model/.medusa"


def of(bundle: Path, environ: dict[str, str]) -> Quarantine:
    return Quarantine(Settings(model=str(bundle.parent)), environ)


def test_the_next_process_knows(bundle: Path, environ: dict[str, str]) -> None:
    assert of(bundle, environ).reason(DIGEST) is None
    assert of(bundle, environ).add(DIGEST, "an illegal address")
    assert of(bundle, environ).reason(DIGEST) == "an illegal address"
    assert of(bundle, {}).reason(DIGEST) == "an illegal address", "another machine that shares the folder"
    assert Quarantine(Settings(state=f"file://{bundle}"), environ).reason(DIGEST)
    assert [path.name for path in bundle.iterdir()] == [FILE]


@pytest.mark.parametrize(
    "named", ["{model}/model.safetensors", "file://{encoded}", "file://{encoded}/model.safetensors"]
)
def test_a_model_named_in_another_way_has_the_same_marks(tmp_path: Path, environ: dict[str, str], named: str) -> None:
    bundle = tmp_path / "a model/.medusa"
    bundle.mkdir(parents=True)
    assert of(bundle, environ).add(DIGEST, "an illegal address")
    model = named.format(model=bundle.parent, encoded=str(bundle.parent).replace(" ", "%20"))
    assert Quarantine(Settings(model=model), {}).reason(DIGEST) == "an illegal address"


def test_it_holds_for_that_bundle_and_driver_only(
    bundle: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of(bundle, environ).add(DIGEST, "an illegal address")
    assert of(bundle, environ).reason(OTHER) is None
    monkeypatch.setattr(quarantine, "driver_version", lambda: "590.1")
    assert of(bundle, environ).reason(DIGEST) is None
    of(bundle, environ).add(OTHER, "a misaligned address")
    assert set(json.loads((bundle / FILE).read_text())) == {OTHER}, "the other driver's mark is of no use any more"


@pytest.mark.parametrize("model", ["s3://bucket/model", "/nowhere/model", None])
def test_a_folder_that_cannot_be_written(environ: dict[str, str], tmp_path: Path, model: str | None) -> None:
    settings = Settings(model=model)
    assert Quarantine(settings, environ).add(DIGEST, "a fault")
    assert (tmp_path / "home/.cache/medusa" / FILE).exists()
    assert Quarantine(settings, environ).reason(DIGEST) == "a fault"


def test_without_a_home(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    assert Quarantine(Settings(model="s3://bucket/model"), environ).add(DIGEST, "a fault")
    assert (tmp_path / f"medusa-{os.getuid()}" / FILE).exists()
    assert Quarantine(Settings(model="s3://bucket/model"), {"TMPDIR": str(tmp_path)}).reason(DIGEST) == "a fault"


# Another user may have made the folder among temporary files, and exchange what lies in it.
_EXCHANGED = """
import os, sys
from medusa_runtime.config import Settings
from medusa_runtime.state.graphs.restoration import quarantine

def exchange(event, arguments):
    if event == "os.chmod" and isinstance(arguments[0], str):
        os.unlink(arguments[0])
        os.symlink(sys.argv[2], arguments[0])

sys.addaudithook(exchange)
quarantine.driver_version = lambda: "580.10"
assert quarantine.Quarantine(Settings(), {"TMPDIR": sys.argv[1]}).add("ab" * 32, "an illegal address")
"""


def test_the_mode_of_the_marks_is_given_to_no_other_file(tmp_path: Path, environ: dict[str, str]) -> None:
    (secret := tmp_path / "secret").touch(0o600)
    subprocess.run([sys.executable, "-c", _EXCHANGED, tmp_path, secret], check=True)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert Quarantine(Settings(), {"TMPDIR": str(tmp_path)}).reason(DIGEST) == "an illegal address"
    assert (tmp_path / f"medusa-{os.getuid()}" / FILE).stat().st_mode & 0o777 == 0o644


def test_nowhere_to_write(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "home").write_text("a file")
    (tmp_path / f"medusa-{os.getuid()}").write_text("another")
    assert not Quarantine(Settings(model="s3://bucket/model"), environ).add(DIGEST, "a fault")


@pytest.mark.parametrize(
    "text", ["", "[", "[1]", '{"' + DIGEST + '": 3}', '{"' + DIGEST + '": {"driver": 1}}', "[" * 9999]
)
def test_damaged_marks_are_none(bundle: Path, environ: dict[str, str], text: str) -> None:
    (bundle / FILE).write_text(text)
    assert of(bundle, environ).reason(DIGEST) is None
    assert of(bundle, environ).add(DIGEST, "a fault")
    assert of(bundle, environ).reason(DIGEST) == "a fault"


def test_what_is_no_small_file_holds_no_start(bundle: Path, environ: dict[str, str]) -> None:
    """A pipe was waited for, for ever, and a link to a device was read until no memory was left."""
    os.mkfifo(bundle / FILE)
    assert of(bundle, environ).reason(DIGEST) is None
    (bundle / FILE).unlink()
    (bundle / FILE).symlink_to("/dev/zero")
    assert of(bundle, environ).reason(DIGEST) is None
    (bundle / FILE).unlink()
    with open(bundle / FILE, "wb") as file:
        file.truncate(1 << 40)
    assert of(bundle, environ).reason(DIGEST) is None
    assert of(bundle, environ).add(DIGEST, "an illegal address")
    assert of(bundle, environ).reason(DIGEST) == "an illegal address"


@pytest.mark.parametrize("inline", [False, True])
def test_inspect_tells_it(tmp_path: Path, environ: dict[str, str], inline: bool) -> None:
    from medusa_adapters.cli.checkpoint.bundle_summary import as_text, summarize
    from medusa_runtime.checkpoint.reader import open_checkpoint
    from medusa_runtime.state.bundle.manifest import Artifact, Manifest
    from medusa_runtime.state.kinds import CUDA_GRAPHS

    checkpoint = open_checkpoint(str(Path(__file__).parents[4] / "examples/pydoc-lm"))
    settings = Settings(state=str(tmp_path), device="cpu")
    data = encode_blueprints(Blueprints())
    name = hashlib.sha256(data).hexdigest()
    artifact = Artifact(CUDA_GRAPHS.name, {}, name, len(data), data if inline else None)
    (tmp_path / "manifest.json").write_bytes(Manifest((artifact,)).to_json())
    Quarantine(settings, environ).add(digest_of(data), "an illegal address")
    told = "not used here: its graphs broke the device's context here: an illegal address"
    try:
        if not inline:
            assert told not in "\n".join(as_text(summarize(checkpoint, settings, verify=False))), "without its blob"
            (tmp_path / "blobs").mkdir()
            (tmp_path / "blobs" / name).write_bytes(data)
        assert told in "\n".join(as_text(summarize(checkpoint, settings, verify=False)))
    finally:
        checkpoint.store.close()
