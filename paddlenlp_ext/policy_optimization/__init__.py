"""Advantages and losses of GRPO and its variants, as pure functions."""
