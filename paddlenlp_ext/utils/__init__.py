"""Helpers for files, locks, logging, registries and JSON; they do not import Paddle."""
