"""One checkpoint's bytes in shared memory, with their progress."""
