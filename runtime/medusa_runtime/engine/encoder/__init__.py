"""The engine for text encoders, which turn texts into vectors."""
