"""Evaluate models on tasks: multiple choice, generation and perplexity, with confidence intervals."""
