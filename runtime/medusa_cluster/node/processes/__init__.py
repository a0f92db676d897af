"""Processes that a node server starts: followed, stopped and never left behind."""
