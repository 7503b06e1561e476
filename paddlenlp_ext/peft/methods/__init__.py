"""Adapter methods, one module each; the registry imports every module of this package."""
