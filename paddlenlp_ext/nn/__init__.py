"""Decoder layers (linear, norms, RoPE, attention, feed-forward, experts, embedding), and activation recomputation."""
