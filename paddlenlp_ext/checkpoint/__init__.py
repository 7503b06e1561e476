"""Files and folders of models: weights, configs, tokenizers, training state. Knows files, not models."""
