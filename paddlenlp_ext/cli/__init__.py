"""Command-line programs behind the scripts in `llm/`."""
