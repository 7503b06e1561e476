"""Read and write weights, configs, tokenizers and training state; nothing here depends on the model classes."""
