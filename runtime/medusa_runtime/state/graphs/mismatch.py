"""Why graphs are captured after all."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The name of a reason; stands in the log and in the timeline."""

    CORRUPT = "corrupt"  # the blob is damaged, truncated or of another version
    GPU = "gpu"  # made on another GPU
    DRIVER = "driver"  # made with another driver
    LIBRARY = "library"  # made with another torch or CUDA library, model or setting
    MEMORY = "memory"  # not enough device memory
    ADDRESS = "address"  # needs the recorded addresses, and they are taken
    MEMORY_RANGE = "memory-range"  # a range that it points into was not placed
    KERNEL_MISSING = "kernel-missing"
    KERNEL_AMBIGUOUS = "kernel-ambiguous"
    NODE_KIND = "node-kind"  # a node that cannot be materialized
    FOREIGN_POINTER = "foreign-pointer"  # points into memory that nobody named
    NOT_DETERMINISTIC = "not-deterministic"  # two captures differ
    CONTENTS = "contents"  # permanent contents could not be told from scratch
    PIECEWISE = "piecewise"  # vLLM's of a part of a compiled model, which only vLLM can call
    ABSENT = "absent"  # a graph that was not captured when materializing
    OUTPUT = "output"  # a replay did not give the stored outputs
    DRIVER_CALL = "driver-call"  # the driver refused a call


class GraphMismatch(Exception):
    """Not an error to a user: whoever catches it captures instead, and logs it once."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    @classmethod
    def parse(cls, text: str) -> GraphMismatch:
        """From its own text, as a bundle keeps it."""
        reason, _, detail = text.partition(": ")
        return cls(Reason(reason), detail) if reason in set(Reason) else cls(Reason.CORRUPT, text)
