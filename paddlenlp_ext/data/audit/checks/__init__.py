"""Checks of a row. To add a check, decorate a function in a module of this package with `check`."""
