"""Convert between tensors in files and model parameters that have different names or shapes, such as experts."""
