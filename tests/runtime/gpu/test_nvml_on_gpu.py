"""What a node reports of real GPUs, and how a process that has imported torch is given one of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from medusa_runtime.device.nvml import Nvml

pytestmark = pytest.mark.gpu

_GB = 10**9


def test_nvml_and_torch_see_the_same_gpus(cuda: Any) -> None:
    import torch

    seen = Nvml().gpus()
    assert len(seen) == torch.cuda.device_count()
    free, total = torch.cuda.mem_get_info(cuda)
    names = [torch.cuda.get_device_name(number) for number in range(len(seen))]
    assert sorted(gpu.name for gpu in seen) == sorted(names)
    first = seen[0]
    if len(seen) == 1:  # of several, torch may have another one first
        assert abs(first.total_bytes - total) < 2 * _GB
        assert abs(first.free_bytes - free) < 2 * _GB
    assert 1 * _GB < first.link_bytes_per_s < 1000 * _GB
    print(seen)


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("-1", 0)])
def test_torch_heeds_the_variable_that_is_set_after_its_import(cuda: Any, visible: str, count: int) -> None:
    code = f"""
import os, torch
os.environ["CUDA_VISIBLE_DEVICES"] = {visible!r}
assert torch.cuda.device_count() == {count}
assert not {count} or torch.ones(1, device="cuda").item() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
