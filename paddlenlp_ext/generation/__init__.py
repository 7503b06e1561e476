"""Text generation: sampling, key-value cache, decoding loop. It calls only `hidden_states` and `logits` of a model."""
