"""Quantized base weights: quantization, storage, and the linear layer that computes with them."""
