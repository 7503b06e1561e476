"""Merge an adapter into its base model, in memory or in the base model's files."""
