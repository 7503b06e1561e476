"""Generation: sampling, the key-value cache, the loop over batches. Knows a model by two methods only."""
