"""Files and directories of models: weights, configs, tokenizers, training state. Depends on files, not on models."""
