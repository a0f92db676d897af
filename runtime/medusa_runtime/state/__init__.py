"""The state bundle, which is materialized offline and restored at a start."""
