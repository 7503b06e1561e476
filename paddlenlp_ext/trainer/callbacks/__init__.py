"""Callbacks of a run: progress, metrics files, loss plot, report and trackers. Custom callbacks subclass `Callback`."""
