"""Checkpoint formats of other quantization programs: GPTQ, AWQ, AutoRound, compressed-tensors, FP8, MXFP4."""
