"""Optimizers: AdamW, optimizers with small state, and offloading of optimizer state."""
