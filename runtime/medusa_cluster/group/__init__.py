"""Workers that hold a model together: a cold start in parallel, and how they become instances (ParaServe §4 to §6)."""
