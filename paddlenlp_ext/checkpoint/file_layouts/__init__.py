"""Conversion between tensors in files and model parameters whose names or shapes differ, such as experts."""
