"""The GPU before there is a torch: whether one is there, its driver, and its context."""
