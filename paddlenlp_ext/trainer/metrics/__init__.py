"""Metrics of generated answers: ROUGE, BLEU and exact match, class labels, and a user's `compute_metrics`."""
