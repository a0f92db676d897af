"""Chat templates of strangers, rendered by Jinja's sandbox within limits on time and memory."""
