"""A folder that another process has opened, also where its sandbox is older than the system call for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# As Docker's seccomp profile did before it knew openat2: a call that is not listed fails with EPERM.
OLD_PROFILE = """
import ctypes, errno, os, struct, sys
from medusa_runtime.errors import MedusaError
from medusa_runtime.storage.folder import FolderStore

def forbid(call, error):
    code = (
        (0x20, 0, 0, 0),  # load the call's number
        (0x15, 0, 1, call),  # another one: skip one
        (0x06, 0, 0, 0x00050000 | error),  # fail with this error
        (0x06, 0, 0, 0x7FFF0000),  # allow
    )
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    if prctl(22, 2, program, 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        sys.exit(77)

folder, error = sys.argv[1], getattr(errno, sys.argv[2])
forbid(437, error)
descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
print(FolderStore(folder, descriptor, confined=False).read("file", 0, 4)[0])
try:
    FolderStore(folder, descriptor, confined=True).read("file", 0, 4)
except MedusaError as refused:
    print(refused)
"""


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
def test_without_openat2_only_what_is_not_confined_is_read(tmp_path: Path, error: str) -> None:
    (tmp_path / "file").write_bytes(b"abcd")
    command = [sys.executable, "-c", OLD_PROFILE, str(tmp_path), error]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if ended.returncode == 77:
        pytest.skip("this kernel takes no seccomp filter")
    assert (ended.returncode, ended.stderr) == (0, "")
    read, refused = ended.stdout.splitlines()
    assert read == "b'abcd'"
    assert refused.startswith("file cannot be opened below a folder alone: ")
