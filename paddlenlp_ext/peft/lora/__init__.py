"""Layers, initialization and file formats that LoRA and its variants share."""
