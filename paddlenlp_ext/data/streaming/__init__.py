"""Streaming (`lazy`): read, tokenize and shuffle rows in windows during training."""
