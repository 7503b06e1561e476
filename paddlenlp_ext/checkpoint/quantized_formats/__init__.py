"""Checkpoint formats of other quantization programs: GPTQ, AWQ, compressed-tensors, FP8, MXFP4."""
