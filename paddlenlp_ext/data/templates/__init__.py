"""Chat templates: conversation -> text of prompts and answers -> token ids and loss mask."""
