"""The papers' evaluation figures, simulated with their constants: what was published beside what comes out."""
