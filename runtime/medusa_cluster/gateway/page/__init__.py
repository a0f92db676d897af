"""The page about a cluster: one HTML file that loads nothing."""
