"""`medusa batch` with vLLM as its engine: our routes and vLLM's own ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plain_environ import plain_environ

pytestmark = pytest.mark.vllm

MEDUSA = Path(sys.executable).with_name("medusa")
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"


@pytest.mark.timeout(400)
def test_a_batch_runs_with_vllm(tmp_path: Path) -> None:
    bodies = {
        "/v1/completions": {"prompt": "def f", "max_tokens": 3},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    }
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    environ = plain_environ()
    words = [MEDUSA, "batch", "--engine", "vllm", "--model", EXAMPLE, "--node-socket", "none", "--max-concurrency", "4"]
    command = [*map(str, words), "-i", "in.jsonl", "-o", "out.jsonl", "--", "--max-logprobs", "5"]
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=380, check=False)
    assert found.returncode == 0, found.stderr
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {one["custom_id"]: one["response"]["status_code"] for one in results} == dict.fromkeys(bodies, 200)
