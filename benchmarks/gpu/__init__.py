"""What a GPU's presence is used for: everything that cannot be measured without one, in four short runs."""
