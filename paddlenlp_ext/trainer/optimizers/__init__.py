"""Optimizers with small state, and offloading of optimizer state."""
