"""Merge an adapter into its base model, in memory or file by file."""
