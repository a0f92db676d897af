"""The function process: gunicorn, its one worker, and the acceptor that answers probes."""
