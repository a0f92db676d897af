"""From a checkpoint in a store to the layers of a model."""
