"""How modules are imported: in one thread at a time, and only as far as they are used."""
