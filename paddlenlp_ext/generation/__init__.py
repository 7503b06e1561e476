"""Text generation: sampling, key-value caches, decoding loops, continuous batching."""
