"""Tokenization of rows: encoding, truncation, worker processes, statistics, and the cache of tokens on disk."""
