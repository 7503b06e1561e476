"""Layers over the ops: linear, RMS norm, layer norm, rotary embedding, attention, feed-forward, embedding."""
