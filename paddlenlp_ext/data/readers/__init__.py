"""Readers of rows from files (a reader for each suffix), hub datasets, built-in datasets and memory."""
