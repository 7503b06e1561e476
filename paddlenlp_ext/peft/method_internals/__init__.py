"""Modules of methods that are too large for one file; each module is named after its method."""
