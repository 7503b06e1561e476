"""Formats of checkpoints that other programs quantized: GPTQ, AWQ, compressed-tensors, FP8, MXFP4."""
