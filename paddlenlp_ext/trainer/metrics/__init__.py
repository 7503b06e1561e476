"""Metrics of generated answers: ROUGE, BLEU and exact match, class labels, and custom metrics (`compute_metrics`)."""
