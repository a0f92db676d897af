"""The function process measured: many streams, slow clients, and what the adapters cost."""
