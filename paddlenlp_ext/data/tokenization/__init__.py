"""Rows to tokens: encoding, truncation, worker processes, statistics, and the cache of tokens on disk."""
