"""One decoder, and the families that it becomes by their configurations."""
