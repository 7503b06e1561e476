"""Layers over the ops: linear, RMS norm, rotary embedding, attention, feed-forward, embedding."""
