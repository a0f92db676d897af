"""Streamed answers: their events, and a record of what a client has, so that another instance can continue."""
