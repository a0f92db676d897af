"""Chat templates of strangers, rendered in a process of their own within limits on time and memory."""
