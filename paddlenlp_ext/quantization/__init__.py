"""Quantization of base weights, storage of quantized weights in checkpoints, and layers with quantized weights."""
