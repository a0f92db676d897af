"""A laboratory: nodes on one machine, each with its own network, processes and link. It needs root."""
