"""Operators, each with a reference implementation in plain Paddle, faster backends, and dispatch between them."""
