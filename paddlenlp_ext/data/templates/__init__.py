"""Chat templates, which convert a conversation to text, token ids and a loss mask."""
