"""Linear layers with weights quantized to 4 or 8 bits."""
