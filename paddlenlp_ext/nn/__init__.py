"""Layers of decoders: linear, norms, RoPE, attention, feed-forward, experts, embedding, activation recomputation."""
