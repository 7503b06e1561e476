"""Training: optimizer steps over packed data, evaluation, checkpoints, logs; `build` assembles a run."""
