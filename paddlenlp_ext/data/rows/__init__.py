"""Parsing of rows into conversations: formats, fields and errors."""
