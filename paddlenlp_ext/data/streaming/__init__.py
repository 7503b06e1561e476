"""Streams (`lazy`): rows are read, tokenized and shuffled in windows during training."""
