"""Decoder-only language models: one decoder, configured for each family."""
