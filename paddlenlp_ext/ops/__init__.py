"""Operators: a reference in plain Paddle for each, faster backends, and the dispatch between them."""
