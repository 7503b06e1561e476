"""Conversion between tensors in files and model parameters with other names or shapes, such as experts."""
