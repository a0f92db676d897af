"""What the torch engine's process sets before it imports torch."""

from __future__ import annotations

import os
import subprocess
import sys

MANY_ROWS = """
from pathlib import Path
from medusa_runtime.config import Settings
from medusa_runtime.engine.preimport import preimport

preimport(Settings())
import torch

def own_mb():
    return next(int(line.split()[1]) / 1000 for line in Path("/proc/self/status").open() if "RssAnon" in line)

weight = torch.ones(256, 64, dtype=torch.bfloat16)
with torch.inference_mode():
    torch.nn.functional.linear(torch.ones(400, 64, dtype=torch.bfloat16), weight)
    before = own_mb()
    for rows in range(33, 433):
        torch.nn.functional.linear(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
print(own_mb() - before)
"""


def test_prompts_of_many_lengths_leave_no_compiled_product_each() -> None:
    """Only CPUs that multiply 16-bit numbers themselves compile any."""
    free = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    ran = subprocess.run([sys.executable, "-c", MANY_ROWS], env=free, capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 180, "400 of them take 270 MB"


def test_a_capacity_that_the_user_has_set_stays() -> None:
    script = "import os; from medusa_runtime.engine.preimport import preimport, Settings; preimport(Settings());"
    script += "print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'], os.environ['LRU_CACHE_CAPACITY'])"
    given = os.environ | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7"}
    given.pop("LRU_CACHE_CAPACITY", None)
    ran = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["7", "128"]
