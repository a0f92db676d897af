"""The reasons why graphs are captured instead of restored."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A reason, by its name in the log and in the timeline."""

    CORRUPT = "corrupt"  # the blob is damaged, truncated or of another version
    NOT_COMPILED = "not-compiled"  # the library that builds graphs could not be compiled when this was installed
    GPU = "gpu"  # made on another GPU
    DRIVER = "driver"  # made with another driver
    LIBRARY = "library"  # made with another torch or CUDA library, model or setting
    MEMORY = "memory"  # not enough device memory
    ADDRESS = "address"  # it needs the recorded addresses, and they are taken
    MEMORY_RANGE = "memory-range"  # a range into which it points was not placed
    KERNEL_MISSING = "kernel-missing"
    KERNEL_AMBIGUOUS = "kernel-ambiguous"
    NODE_KIND = "node-kind"  # a node that cannot be materialized
    FOREIGN_POINTER = "foreign-pointer"  # it points into memory without a name
    NOT_DETERMINISTIC = "not-deterministic"  # two captures differ
    CONTENTS = "contents"  # permanent contents cannot be distinguished from scratch memory
    PIECEWISE = "piecewise"  # vLLM's graph of a part of a compiled model, which only vLLM can call
    ABSENT = "absent"  # this graph was not captured when materializing
    OUTPUT = "output"  # a replay did not give the stored outputs
    DRIVER_CALL = "driver-call"  # the driver refused a call


class GraphMismatch(Exception):
    """A graph does not fit here. It is no error for the user: it is logged once, and the graph is captured instead."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    @classmethod
    def parse(cls, text: str) -> GraphMismatch:
        """Parse the text of a mismatch, as a bundle stores it."""
        reason, _, detail = text.partition(": ")
        return cls(Reason(reason), detail) if reason in set(Reason) else cls(Reason.CORRUPT, text)
