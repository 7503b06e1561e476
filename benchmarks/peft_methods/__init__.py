"""Comparison of the adapter methods over several tasks."""
