"""Which processors a snapshot is for. The other conditions are tested with real processes (test_use.py)."""

from __future__ import annotations

import os
import platform
from typing import Any

import pytest
from medusa_adapters.cli.serving_process import VARIABLES
from medusa_runtime.process import share_cores
from medusa_snapshot.conditions import conditions, difference, processor, variables


def _with(*flags: str) -> dict[str, Any]:
    return {"python": 1, "variables": {}, "files": [], "processor": list(flags)}


@pytest.mark.parametrize(
    ("was", "found", "why"),
    [
        (("avx", "avx2"), ("avx", "avx2"), None),
        (("avx", "avx2"), ("avx", "avx2", "sha_ni"), None),
        (("avx", "avx2"), ("avx",), "it was made on a processor that has avx2, and this one has not"),
        (("avx",), ("avx", "avx512f", "avx512bw"), "it was made on a processor without avx512f, which this one has"),
    ],
)
def test_a_processor_may_have_more_instructions_but_no_more_registers(
    was: tuple[str, ...], found: tuple[str, ...], why: str | None
) -> None:
    assert difference(_with(*was), _with(*found)) == why


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64")
def test_the_features_of_this_processor_are_found() -> None:
    assert {"sse2", "cx16", "xsave"} <= set(processor())
    assert not {"hypervisor", "constant_tsc", "vmmcall", "tsc"} & set(processor())


def test_only_variables_that_are_read_at_a_start_matter() -> None:
    environ = {"OMP_NUM_THREADS": "2", "PATH": "/", "PYTHONUNBUFFERED": "1", "AWS_SECRET_ACCESS_KEY": "x"}
    environ |= {"VLLM_CACHE_ROOT": "/cache", "CUDA_VISIBLE_DEVICES": "1"}
    assert conditions(environ, ())["variables"] == {"OMP_NUM_THREADS": "2"}
    assert conditions(environ, ("VLLM_",))["variables"] == {"OMP_NUM_THREADS": "2", "VLLM_CACHE_ROOT": "/cache"}


def test_secrets_and_the_services_of_kubernetes_do_not_matter() -> None:
    environ = {
        "HF_TOKEN": "x", "PYTHON_DB_PASSWORD": "x",
        "VLLM_API_KEY": "x", "VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_SERVICE_PORT_HTTP": "80",
        "VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_PORT_80_TCP_ADDR": "10.0.0.1", "HF_TOKEN_PATH": "/token",
    }  # fmt: skip
    assert variables(environ, VARIABLES["vllm"]) == {"HF_TOKEN_PATH": "/token"}


@pytest.mark.parametrize("name", ["PROMETHEUS_MULTIPROC_DIR", "HUGGINGFACE_HUB_CACHE", "NPY_DISABLE_CPU_FEATURES"])
def test_what_libraries_of_vllm_read_at_import_matters(name: str) -> None:
    assert variables({name: "x", "OPENAI_API_KEY": "x"}, VARIABLES["vllm"]) == {name: "x"}


def test_what_an_instance_sets_for_its_processes_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    before = variables(os.environ, ())
    monkeypatch.setenv("GOMP_SPINCOUNT", "1")  # so that it is removed after this test
    del os.environ["GOMP_SPINCOUNT"]
    share_cores()
    assert "GOMP_SPINCOUNT" in os.environ
    assert variables(os.environ, ()) == before
