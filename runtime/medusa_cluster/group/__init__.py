"""Groups of workers that hold a model together to start it faster, and later become instances (ParaServe §4 to §6)."""
