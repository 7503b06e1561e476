"""Preference data: rows with answers that are compared or rated, and their batches."""
