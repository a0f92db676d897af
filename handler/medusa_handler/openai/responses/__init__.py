"""/v1/responses, without state: a request's items as messages, and the answer as items and typed events."""
