"""Everything that cannot be measured without a GPU, in four short runs."""
