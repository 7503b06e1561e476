"""Rows of data files: their formats, fields and errors, and the conversations that are parsed from them."""
