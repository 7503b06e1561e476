"""Teacher of a distillation: its weights, or the stored log-probabilities of its most likely tokens."""
