"""A filter that forbids one call to the kernel, as a container's seccomp profile may."""

from __future__ import annotations

import ctypes
import struct


def forbid(call: int, error: int) -> None:
    """Let this process and those that it starts get ``error`` for the call of this number. For ``preexec_fn``.

    Raises OSError if the kernel takes no filter.
    """
    code = (
        (0x20, 0, 0, 0),  # load the call's number
        (0x15, 0, 1, call),  # another one: skip one
        (0x06, 0, 0, 0x00050000 | error),  # fail with this error
        (0x06, 0, 0, 0x7FFF0000),  # allow
    )
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # PR_SET_NO_NEW_PRIVS, and PR_SET_SECCOMP with SECCOMP_MODE_FILTER
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter")
