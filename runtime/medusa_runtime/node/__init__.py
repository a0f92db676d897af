"""The node agent: one process per node that owns regions and pre-warmed engine processes, behind a Unix socket."""
