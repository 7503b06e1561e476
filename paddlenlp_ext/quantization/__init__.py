"""Quantization of base weights, their storage in checkpoints, and the layers that compute with them."""
