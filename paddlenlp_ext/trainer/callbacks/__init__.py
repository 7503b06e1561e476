"""Callbacks of a run: progress, metrics files, loss plot, VisualDL; `Callback` is the base class of a user's own."""
