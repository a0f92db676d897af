"""The engine of text encoders, which turn texts into vectors."""
