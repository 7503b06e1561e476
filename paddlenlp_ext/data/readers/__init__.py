"""Readers of rows from files (a reader for each suffix), hub data sets, built-in datasets and memory."""
