"""Prompts, sampled groups of completions, and their batches."""
