"""Streamed answers: their events, and what a client has been sent of one, so that another instance can go on."""
