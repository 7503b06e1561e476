"""Text generation: sampling, key-value caches, decoding loops and continuous batching."""
