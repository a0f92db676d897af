"""What is run: whole models, and the same models as layers, with checkpoints of their true shapes."""
