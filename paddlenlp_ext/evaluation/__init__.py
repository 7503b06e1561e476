"""Scores of models on tasks: multiple choice, generated answers and perplexity, with confidence intervals."""
