"""Adapter methods, one file each; the registry imports every module of this package."""
