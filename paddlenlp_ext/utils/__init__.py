"""Helpers for all layers: files, locks, logging, registries, JSON. Paddle is not imported."""
