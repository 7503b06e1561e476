"""Files and directories of models: weights, configs, tokenizers, training state. Independent of the model classes."""
