"""Command-line programs that the scripts in `llm/` call."""
