"""Training: optimizer steps over packed data, evaluation, checkpoints, callbacks; `build_trainer` assembles a run."""
