"""Text generation: sampling, key-value cache, decoding loop. Of a model it uses only `hidden_states` and `logits`."""
