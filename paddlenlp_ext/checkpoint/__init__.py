"""Read and write weights, configs, tokenizers and training state, independently of the model classes."""
