"""Helpers for every layer: files, logging, registries, JSON. Paddle is not imported."""
