"""`medusa bench coldstart`: the ways to start a model, what is measured of each, and the tables that show it."""
