"""What is materialized offline and restored at a start: the state bundle."""
