"""A folder that another process has opened, also where its sandbox is older than the system call for it."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from seccomp import forbid

READS = """
import os, sys
from medusa_runtime.errors import MedusaError
from medusa_runtime.storage.folder import FolderStore

folder = sys.argv[1]
descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
print(FolderStore(folder, descriptor, confined=False).read("file", 0, 4)[0])
try:
    FolderStore(folder, descriptor, confined=True).read("file", 0, 4)
except MedusaError as refused:
    print(refused)
"""
OPENAT2 = 437


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
def test_without_openat2_only_what_is_not_confined_is_read(tmp_path: Path, error: str) -> None:
    (tmp_path / "file").write_bytes(b"abcd")
    # As Docker's seccomp profile did before it knew openat2: a call that is not listed fails with EPERM.
    try:
        ended = subprocess.run(
            [sys.executable, "-c", READS, str(tmp_path)],
            preexec_fn=lambda: forbid(OPENAT2, getattr(errno, error)),
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    except subprocess.SubprocessError:
        pytest.skip("this kernel takes no seccomp filter")
    assert (ended.returncode, ended.stderr) == (0, "")
    read, refused = ended.stdout.splitlines()
    assert read == "b'abcd'"
    assert refused.startswith("file cannot be opened below a folder alone: ")
