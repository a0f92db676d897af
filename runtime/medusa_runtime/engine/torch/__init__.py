"""The torch engine: small, and serving before all of its weights have arrived."""
