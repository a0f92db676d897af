"""Starts with bundles that anybody may have written, from a real server: whose code is used."""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest
from medusa_runtime.region.reader import Region
from medusa_runtime.state.bundle.writer import BundleWriter
from medusa_runtime.state.kinds import KV_PLAN, WEIGHT_INDEX, file_name
from medusa_vllm import COMPILE_CACHE

from .test_restore import LARGE, Published, check, fill, left_out, patient, published, used

__all__ = ["patient", "published"]  # fixtures


def test_code_of_a_place_that_nobody_named_is_left_out_alone_and_not_even_fetched(
    published: Published, region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()), (KV_PLAN, b"small"), (COMPILE_CACHE, LARGE))
    published.origin.requests.clear()
    stages = fill(region, published.url, trust_state=f"{published.origin.url}/others")
    check(region)
    assert used(stages) == {"weight-index", "kv-plan"}
    (record,) = caplog.records
    assert f"set --trust-state={published.url}, or sign" in record.message
    assert record.message.endswith(left_out(stages)["compile-cache"])
    assert not any("blobs" in path for path, *_ in published.origin.requests)
    assert region.code(file_name("compile-cache"), timeout_s=60) is None


@pytest.mark.parametrize(("tampered", "key"), [(False, "ours"), (True, "ours"), (False, "another"), (False, "none")])
def test_signed_code_is_used_from_anywhere_by_whoever_names_the_key(
    published: Published, region: Region, tampered: bool, key: str
) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from medusa_runtime.state.bundle.signing import Signer

    signer, other = Signer(Ed25519PrivateKey.generate()), Signer(Ed25519PrivateKey.generate())
    manifest = published.publish((COMPILE_CACHE, LARGE))
    with BundleWriter(published.folder) as writer:
        writer.commit(manifest, signer)
    published.upload()
    if tampered:
        published.manifest(lambda document: document["artifacts"][0].update(size=len(LARGE) - 1))
    named = {"ours": signer.public, "another": other.public, "none": None}[key]
    stages = fill(region, published.url, trust_state=None, trust_key=named)
    check(region)
    good = key == "ours" and not tampered
    assert region.code(file_name("compile-cache"), timeout_s=60) == (LARGE if good else None)
    assert ("compile-cache" in used(stages)) is good
    assert ("compile-cache" in left_out(stages)) is not good
    view = region.view_code(file_name("compile-cache"))
    assert (view is not None) is good
    if view is not None:
        assert isinstance(view.obj, mmap.mmap), "it is not copied"
        region.close()
        assert view == LARGE


def test_a_signed_manifest_does_not_cover_other_blobs(published: Published, region: Region) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from medusa_runtime.state.bundle.signing import Signer

    signer = Signer(Ed25519PrivateKey.generate())
    manifest = published.publish((COMPILE_CACHE, LARGE))
    with BundleWriter(published.folder) as writer:
        writer.commit(manifest, signer)
    published.upload()
    published.origin.put(f"/m/.medusa/blobs/{manifest.artifacts[0].sha256}", os.urandom(len(LARGE)))
    stages = fill(region, published.url, trust_state=None, trust_key=signer.public)
    check(region)
    assert "sha256 is wrong" in left_out(stages)["compile-cache"]
    assert region.code(file_name("compile-cache"), timeout_s=60) is None


@pytest.mark.parametrize("size", [60 << 30, 1 << 62])
def test_a_small_artifact_that_says_it_is_huge_takes_no_memory(published: Published, region: Region, size: int) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))

    def huge(document: dict[str, Any]) -> None:
        document["artifacts"][0].update(size=size)
        del document["artifacts"][0]["inline"]

    published.manifest(huge)
    stages = fill(region, published.url)
    check(region)
    assert "expected at most" in left_out(stages)["weight-index"]


def test_a_bundles_words_forge_no_line_of_the_log(
    published: Published, region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    published.publish((KV_PLAN, b"small"))
    published.manifest(lambda document: document["artifacts"][0].update(kind="x\n2026 ERROR forged \x1b[2J"))
    fill(region, published.url)
    check(region)
    assert caplog.records
    assert all(record.message.isprintable() for record in caplog.records)
