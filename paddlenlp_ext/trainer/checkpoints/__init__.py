"""Checkpoints of a run: `output_dir`, saving in the background, restoring and resuming."""
