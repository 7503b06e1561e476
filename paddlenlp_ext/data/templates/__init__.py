"""Chat templates, which convert a conversation to the text of prompts and answers, token ids and a loss mask."""
