"""Callbacks of a run: progress, metrics files, loss plot and VisualDL. Custom callbacks subclass `Callback`."""
