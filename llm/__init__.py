"""Command-line programs for users."""
