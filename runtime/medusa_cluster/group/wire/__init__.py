"""What travels between the workers of a group, and how."""
