"""The header of a region: its fields and states.

A region starts with a header of one page. Its fields are 8-byte words, which are stored through a memoryview of words:
an aligned store is one instruction, so no reader ever sees half of it. (struct.pack_into writes byte by byte.)
"""

from __future__ import annotations

import os
from enum import IntEnum

HEADER_BYTES = 4096
ERROR_OFFSET = 1024
ERROR_BYTES = HEADER_BYTES - ERROR_OFFSET


class State(IntEnum):
    """The state of a region: EMPTY → INDEXED (index and files can be read, data arrives) → DONE.

    It can become FAILED from EMPTY or INDEXED.
    """

    EMPTY = 0
    INDEXED = 1
    DONE = 2
    FAILED = 3


class LateFileState(IntEnum):
    """The state of a late file: PENDING (not there yet), PRESENT, or WITHHELD (will never come)."""

    PENDING = 0
    PRESENT = 1
    WITHHELD = 2


class Word(IntEnum):
    """The header's words, by index. The watermark counts bytes without a gap, in fetch order (ParaServe §5.1)."""

    WATERMARK = 0
    STATE = 1
    GENERATION = 2
    TOTAL_BYTES = 3
    FETCHED_BYTES = 4
    KEPT_BYTES = 5  # the bytes that this generation's writer found already there
    STARTED_NS = 6
    ENDED_NS = 7
    CHUNK_BYTES = 8
    CHUNK_COUNT = 9
    INDEX_OFFSET = 10
    INDEX_BYTES = 11
    FILES_OFFSET = 12
    FILES_BYTES = 13
    DATA_OFFSET = 14
    REGION_BYTES = 15
    ERROR_BYTES = 16
    RELEASED_BYTES = 17  # written by a reader that frees memory while it loads; see release.py
    CHECKSUMS_OFFSET = 18  # where the chunks' checksums are, 8 bytes each; 0 if no other machines read the region
    INDEX_CHECKSUM = 19  # the checksum of the index and the checkpoint's files; see checksummed.py
    FIRST_NS = 20  # when the first chunk of this generation's writer was published
    RECEIVED_BYTES = 21  # like FETCHED_BYTES, but with unfinished chunks, which take long on a slow link
    RETRIES = 22  # requests to the store that failed and were tried again


RING_OFFSET, RING_WORDS = 512, 64  # requests of readers; see demand.py
PACE_OFFSET = RING_OFFSET + 8 * RING_WORDS  # one word, the pace of chunks that no reader waits for; see demand.py
TABLE_OFFSET = HEADER_BYTES  # the chunk table: one byte for each chunk


def reopen(fd: int, flags: int) -> int:
    """Open the same memfd with a new file description, which has a mode and locks of its own."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
