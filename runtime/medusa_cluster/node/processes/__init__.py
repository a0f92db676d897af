"""Processes of a node server: how they are started, watched, ended, and never left behind."""
