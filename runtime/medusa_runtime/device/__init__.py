"""What is known about the GPU before torch is imported: whether there is one, its driver, and its context."""
