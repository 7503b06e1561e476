"""Sampled and stored rollouts of a GRPO run."""
