"""Read and write model folders: weights, configs, tokenizers and training state, independent of the model classes."""
