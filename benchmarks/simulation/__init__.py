"""The papers' evaluation figures, simulated with the papers' constants and compared with the published numbers."""
