"""Reasons to stop training before its last step: signals, `max_train_time`, early stopping."""
