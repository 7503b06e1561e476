"""Layers over the ops: linear, norm, rotation, attention, feed-forward, embedding."""
