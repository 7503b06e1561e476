"""Predict the peak memory of a training step."""
