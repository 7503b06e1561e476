"""Losses and metrics of preference training and of reward models, as pure functions."""
