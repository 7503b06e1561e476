"""Preference training: losses over the log-probabilities of answers, and their metrics."""
