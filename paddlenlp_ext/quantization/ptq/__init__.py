"""Post-training quantization of linear layers: round to nearest, GPTQ, AWQ."""
