"""Checks of a row: a new check is one function in a module of this package."""
