"""What a process of the vLLM engine sets before it imports vLLM."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os
from medusa_runtime.config import Settings
from medusa_vllm.factory import preimport

try:
    preimport(Settings(engine="vllm", model="m", vllm_mode="compatible"))
finally:
    print(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], os.environ["LRU_CACHE_CAPACITY"])
"""


def test_prompts_of_many_lengths_leave_no_compiled_product_each() -> None:
    """What the limit does is tested with torch alone (``runtime/engine/test_preimport.py``)."""
    free = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=free, capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["128", "128"], ran.stderr
