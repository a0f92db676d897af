"""Commands about a checkpoint: `medusa fetch`, `inspect` and `materialize`."""
