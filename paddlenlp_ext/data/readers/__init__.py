"""Formats of data files: each module registers a reader under the suffixes of its files."""
