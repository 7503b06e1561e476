"""Scripts that users run."""
