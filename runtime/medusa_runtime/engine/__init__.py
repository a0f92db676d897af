"""What turns prompts into tokens."""
