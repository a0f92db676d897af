"""Object stores: where checkpoints are fetched from."""
