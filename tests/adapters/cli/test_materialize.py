"""How `medusa materialize` starts the instances that it measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_adapters.bench.coldstart.contestants import Medusa, Question
from medusa_adapters.cli import command_line
from medusa_adapters.cli.checkpoint import materialize
from medusa_adapters.cli.serve import warn_of_unread_flags
from medusa_runtime.config import Settings


@pytest.mark.parametrize("flags", [None, "--enforce-eager", "--max-num-seqs 3 --override '{\"a b\": 1}'"])
def test_a_measured_start_has_the_same_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str | None
) -> None:
    asked: list[Question] = []

    @contextmanager
    def start(self: Medusa, question: Question) -> Iterator[Any]:
        asked.append(question)
        answer = SimpleNamespace(first_token_ns=0, end_ns=8)
        yield SimpleNamespace(completion=lambda body: answer, wait_ready=lambda: None, stages=lambda: (), started_ns=0)

    monkeypatch.setattr(Medusa, "start", start)
    monkeypatch.setattr(materialize, "summarize", lambda timelines, decode_s: None)
    settings = Settings(model="m", engine="vllm", compile="never", kv_cache_mb=64, vllm_args=flags)
    materialize.measure(settings, tmp_path, 1)
    words = command_line._parse(["serve", *asked[0].flags])
    assert {name: getattr(words, name) for name in ("state", "compile", "kv_cache_mb", "vllm_args", "threads")} == {
        "state": str(tmp_path.resolve()), "compile": "never", "kv_cache_mb": "64", "vllm_args": flags, "threads": None,
    }  # fmt: skip


def test_a_flag_that_only_another_engine_reads_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_unread_flags({"compile": "always", "dtype": "float32", "kernels": None}, "torch")
    assert capsys.readouterr().err == "WARNING: --compile has no effect with --engine torch; it is for --engine vllm\n"
    warn_of_unread_flags({"compile": "always"}, "vllm-group")
    assert capsys.readouterr().err == ""
