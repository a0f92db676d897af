"""The model behind the function: its name, its files, and what is generated or embedded with it."""
