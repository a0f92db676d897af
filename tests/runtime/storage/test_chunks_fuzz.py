"""What a peer may send to the compiled code for chunks, which AddressSanitizer and UBSan watch meanwhile."""

from __future__ import annotations

from pathlib import Path

from medusa_runtime import storage
from sanitizers import run_watched

SOURCE = Path(storage.__file__).parents[1] / "kernels/source/chunks.c"


def test_whatever_a_peer_sends_stays_within_its_chunks(tmp_path: Path) -> None:
    run_watched(Path(__file__).with_name("fuzz_chunks.py"), SOURCE, tmp_path)
