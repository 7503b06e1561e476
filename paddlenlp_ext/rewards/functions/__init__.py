"""Built-in reward functions, one per module."""
