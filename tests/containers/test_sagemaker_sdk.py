"""AWS's own SDK starts the image in local mode, passes /ping, and predicts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from .conftest import EXAMPLE, ROOT

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]  # the first test may build the base

SDK = ROOT / "out" / "sagemaker" / "bin" / "python"


@pytest.mark.skipif(not SDK.exists(), reason="needs the SageMaker SDK, in its own environment: make test-sagemaker")
def test_local_mode(base_image: str) -> None:
    script = Path(__file__).with_name("sagemaker_local.py")
    ran = subprocess.run([SDK, script, base_image, EXAMPLE], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    text, stream = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('["')))
    assert text.strip()
    events = stream.split("\n\n")
    assert events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
