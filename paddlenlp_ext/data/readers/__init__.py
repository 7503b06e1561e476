"""Readers of rows: file formats, which register under their suffixes, hub data sets, built-in data and memory."""
