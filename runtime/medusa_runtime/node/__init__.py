"""The node agent: a process on each node that owns regions and pre-warmed engine processes, behind a Unix socket."""
