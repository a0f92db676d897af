"""Charts and pages of a cold start."""
