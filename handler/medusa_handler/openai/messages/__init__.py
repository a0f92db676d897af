"""/v1/messages, Anthropic's interface: a request's blocks as messages, and the answer as blocks and typed events."""
