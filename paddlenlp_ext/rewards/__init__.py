"""Reward functions of sampled completions."""
