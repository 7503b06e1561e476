"""Estimate of the peak memory of a training step, from shapes only."""
